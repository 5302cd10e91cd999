"""What a chapter adds and the heart can do without; each module is imported only when it is used."""
