"""Your answers as tests, for those who like pytest better than `make grade`: python -m pytest chapters/exercises
(`make test` or `pip install -r requirements-test.txt` installs it.)

Not part of the project's own suite, which must not depend on what has been solved; that is tests/test_exercises.py."""
import pytest

import grade
from lang import T, default_language

TASKS = [(chapter, number, task.name) for chapter in grade.chapters()
         for number, task in enumerate(grade.tasks_of(chapter), 1)]
HEAD = T("chapter {chapter}, task {task}, {name}: {status}")


@pytest.mark.parametrize("chapter, number, name", TASKS)
def test_task(chapter, number, name):
    say = grade.speaker(chapter, default_language())
    (report,) = grade.grade(chapter, grade.tasks_file(chapter, say.language), only=number)
    if report.status != "solved":
        head = say(HEAD, chapter=chapter, task=number, name=name, status=say(grade.STATUS[report.status]))
        pytest.fail(f"{head}\n{report.text(say)}", pytrace=False)
