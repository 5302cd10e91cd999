"""A class: a folder of submissions, graded side by side, to a table and to grades.csv in the folder.

    python chapters/exercises/grade.py 1 --folder submissions/

A submission is NAME.py, or a folder NAME with a tasks.py in it. It can be stopped and started again: who is in
grades.csv already, with the same file and graded by the same grader, is not graded again.
"""
from __future__ import annotations

import csv
import hashlib
import json
import os
import pathlib
from concurrent.futures import ThreadPoolExecutor

from grade import HERE, folder_of, grade, tasks_of
from lang import Say, wide


def submissions(folder) -> dict[str, pathlib.Path]:
    """{student: file}: NAME.py, or a folder NAME with a tasks.py, or else its only Python file, in it."""
    found = {}
    for path in sorted(pathlib.Path(folder).iterdir()):
        if path.is_dir():
            files = [f for f in (path / "tasks.py", path / "tasks.zh.py") if f.is_file()] or sorted(path.glob("*.py"))
            if files:
                found[path.name] = files[0]
        elif path.suffix == ".py":
            found[path.stem] = path
    return found


def grade_folder(chapter, folder, each=lambda student, row: None, workers=None) -> list[dict]:
    """A row a student, as in grades.csv, which is written after each. Who is in it already, with the same file and the
    same grader, isn't graded again. each: called with (student, row) as they come."""
    table, tasks = pathlib.Path(folder) / "grades.csv", tasks_of(chapter)
    graders = (*HERE.glob("*.py"), folder_of(chapter) / "grader.py")
    version = b"".join(path.read_bytes() for path in sorted(graders))
    names = [f"{task.name} ({task.points})" for task in tasks]
    columns = ["student", "points", "of", *names, *(f"{task.name}: why" for task in tasks), "file", "fingerprint"]
    known = {}
    if table.is_file():
        with open(table, newline="", encoding="utf-8-sig") as file:
            known = {row["fingerprint"]: row for row in csv.DictReader(file) if row.keys() == set(columns)}
    english, rows = Say("en"), {}

    def one(student, path):
        fingerprint = hashlib.sha256(version + student.encode() + b"\0" + path.read_bytes()).hexdigest()[:16]
        if fingerprint in known:
            return known[fingerprint]
        reports = list(grade(chapter, path))
        return dict(zip(columns, [
            student, sum(r.points for r in reports), sum(r.of for r in reports), *(r.status for r in reports),
            *(english(r.rule) if r.rule else "" for r in reports), path.relative_to(folder).as_posix(), fingerprint]))

    found = submissions(folder)
    for task in tasks:                  # before the threads: both would compute them
        task.cases()
    with ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        jobs = {student: pool.submit(one, student, path) for student, path in found.items()}
        for student, job in jobs.items():
            rows[student] = job.result()
            each(student, rows[student])
            part = table.with_suffix(".part")
            with open(part, "w", newline="", encoding="utf-8-sig") as file:      # the mark by which Excel knows UTF-8
                writer = csv.DictWriter(file, columns)
                writer.writeheader()
                writer.writerows({column: spared(row[column]) for column in columns} for row in rows.values())
            os.replace(part, table)
    return list(rows.values())


def spared(cell):
    """A spreadsheet takes a cell that begins with = for a formula; names of files are the students'."""
    return f"'{cell}" if isinstance(cell, str) and cell[:1] in ("=", "+", "-", "@") else cell


def print_class(args, say) -> int:
    """The table, a line a student as they are graded: points, then a mark a task."""
    mark = {"solved": "+", "not started": ".", "missing": "."}
    if args.json:
        print(json.dumps(grade_folder(args.chapter, args.folder), indent=1, ensure_ascii=False))
        return 0
    tasks = tasks_of(args.chapter)
    found = submissions(args.folder)
    room = max([wide(student) for student in found] + [8])
    print(say("{count} submissions; + solved, - wrong, . not started", count=len(found)))

    def line(student, row):
        marks = " ".join(mark.get(row[f"{task.name} ({task.points})"], "-") for task in tasks)
        print(f"{student}{' ' * (room - wide(student))}  {row['points']:>4} / {row['of']}  {marks}", flush=True)

    rows = grade_folder(args.chapter, args.folder, line)
    for number, task in enumerate(tasks, 1):
        solved = sum(row[f"{task.name} ({task.points})"] == "solved" for row in rows)
        print(say("task {number}, {name}: solved by {solved} of {count}", number=number, name=task.name, solved=solved,
                  count=len(rows)))
    print(say("written: {file}", file=str(pathlib.Path(args.folder) / "grades.csv")))
    return 0
