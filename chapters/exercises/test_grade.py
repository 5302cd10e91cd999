"""Your answers as tests, for those who like pytest better than `make grade`: python -m pytest chapters/exercises
(`make test` or `pip install -r requirements-test.txt` installs it.)

Not part of the project's own suite, which must not depend on what has been solved; that is tests/test_exercises.py."""
import pytest

import grade

TASKS = [(chapter, number, task.name) for chapter in grade.chapters()
         for number, task in enumerate(grade.tasks_of(chapter), 1)]


@pytest.mark.parametrize("chapter, number, name", TASKS)
def test_task(chapter, number, name):
    (report,) = grade.grade(chapter, only=number)
    if report.status != "solved":
        pytest.fail(f"chapter {chapter}, task {number}, {name}: {report.status}\n{report.text()}", pytrace=False)
