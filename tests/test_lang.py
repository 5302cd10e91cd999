"""The two languages: every template of the chapters and exercises has its Chinese, with the same placeholders, and no
catalogue keeps what nobody says. Files are found by looking: a new chapter is tested without a line more."""
import re

import pytest

from conftest import ROOT
from lang import (Say, Sentence, T, catalogue, default_language, fill, flow, key, placeholders, templates, wide)

CHAPTERS = ROOT / "chapters"
SOURCES = [path for path in sorted(CHAPTERS.rglob("*.py")) if not path.name.endswith("zh.py")
           and re.search(r"^ *from lang import", path.read_text(encoding="utf-8"), re.MULTILINE)]
FOLDERS = sorted({path.parent for path in SOURCES})


def speaking(sources):
    """{file: its templates}, of the files that have any."""
    found = {}
    for path in sources:
        try:
            found[path] = templates(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise AssertionError(f"{path.relative_to(ROOT)}, {error}") from None
    return {path: said for path, said in found.items() if said}


def missing(said, chinese):
    """Templates that the catalogue doesn't have."""
    known = {key(template) for template in chinese}
    return [template for template in said if key(template) not in known]


def amiss(chinese):
    """Entries whose Chinese holds other values than the English, or isn't Chinese."""
    return [english for english, translated in chinese.items()
            if placeholders(english) != placeholders(translated)
            or not any("\u4e00" <= c <= "\u9fff" for c in translated) and key(english) != key(translated)
            and re.search("[a-z]", re.sub(r"\{.*?\}", "", english))]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(CHAPTERS)))
def test_every_template_has_its_chinese(path):
    for path, said in speaking([path]).items():
        assert not missing(said, catalogue(path)), f"{path.name} says this in English only"


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: str(path.relative_to(CHAPTERS)) or "chapters")
def test_every_catalogue_is_whole_and_has_nothing_left_over(folder):
    """NAME.zh.py belongs to NAME.py, zh.py to all others of its folder."""
    for path in sorted(folder.glob("*zh.py")):
        if path.name.startswith(("tasks", "labs")):          # a task file in Chinese, no catalogue
            continue
        own = [path.with_name(path.name.replace(".zh.py", ".py"))] if path.name != "zh.py" else [
            source for source in SOURCES if source.parent == folder and not source.with_name(
                f"{source.stem}.zh.py").is_file()]
        chinese = catalogue(own[0] if path.name != "zh.py" else folder)
        said = [template for found in speaking(own).values() for template in found]
        assert not amiss(chinese), f"{path.name}: other values than the English, or no Chinese"
        assert not missing(chinese, said), f"{path.name}: nobody says this"


def test_what_is_missing_or_amiss_is_found():
    said = templates('say("{n} tokens", n=1)\nHEADS = T({"a": "step", "b": ["free", "used"]})\n'
                     'Sentence("at {x}", x=say("in"))\n'
                     'page.say("one" if x else "two")\nsay(head)\nT("three")\nother("four")')
    assert sorted(said) == sorted(["{n} tokens", "step", "free", "used", "at {x}", "in", "one", "two", "three"])
    assert missing(said, dict.fromkeys(said[1:], "")) == said[:1]
    assert amiss({"{n} tokens": "{m} 个 token", "at {x}": "在 {x} 处", "step": "step", "free": "frei", "{a:.1f} s": "{a} 秒"}) == [
        "{n} tokens", "free"]
    with pytest.raises(ValueError, match="line 2: an f-string"):
        templates('\nsay(f"{n} tokens")')


@pytest.mark.parametrize("environ, language", [
    ({}, "en"), ({"LANG": "C.UTF-8"}, "en"), ({"LANG": "zh_CN.UTF-8"}, "zh"), ({"LANG": "zh_CN.UTF-8", "LC_ALL": "C"}, "en"),
    ({"LANG": "en_GB.UTF-8", "LC_MESSAGES": "zh_TW"}, "zh"), ({"LC_ALL": "", "LANG": "zh_CN"}, "zh")])
def test_the_locale_decides(environ, language):
    assert default_language(environ) == language


def test_saying():
    chinese = {"{n} of {total} tokens": "共 {total} 个 token，其中 {n} 个", "nobody": "无人"}
    en, zh = Say("en", chinese), Say("zh", chinese)
    assert en("{n} of {total} tokens", n=1, total=2) == "1 of 2 tokens"
    assert zh("{n} of {total}\n    tokens", n=1, total=2) == "共 2 个 token，其中 1 个"      # broken where its line was full
    assert zh("not there: {n}", n=1) == "not there: 1"
    assert zh(Sentence("{n} of {total} tokens", n=Sentence("nobody"), total=3)) == "共 3 个 token，其中 无人 个"
    assert Say("zh", {"a": "甲"}, {"a": "乙", "b": "丙"})("a") == "甲"
    assert T(chinese) is chinese and Sentence("a", n=1) == Sentence("a", n=1) != Sentence("a", n=2)
    with pytest.raises(ValueError, match="language is 'de'"):
        Say("de")


def test_a_catalogue_is_its_files_or_its_folders(tmp_path):
    (tmp_path / "zh.py").write_text("ZH = {'a': '甲'}")
    (tmp_path / "one.zh.py").write_text("ZH = {'a': '乙'}")
    assert catalogue(tmp_path) == catalogue(tmp_path / "two.py") == {"a": "甲"} and catalogue(tmp_path / "one.py") == {"a": "乙"}
    (tmp_path / "zh.py").unlink()
    assert catalogue(tmp_path / "two.py") == {}


def test_setting():
    assert fill("x" * 30, 20, "a ", "  ") == "a " + "x" * 18 + "\n  " + "x" * 12
    assert wide("KV 缓存") == 7
    assert flow("one\n  two\n\n每层都有\n  自己的 K") == ["one two", "每层都有自己的 K"]
    for text in ("Only KV heads are cached, and the queries are never kept in it.", "只有 KV 头会进入缓存，查询头用完就丢弃，不会留在缓存里。"):
        lines = fill(text, 20, "rule ", "     ").split("\n")
        assert len(lines) > 2 and all(wide(line) <= 20 for line in lines)
        assert lines[0].startswith("rule ") and all(line.startswith("     ") for line in lines[1:])
        assert not any(line.strip()[0] in "，。" for line in lines)
        assert "".join(" ".join(line[5:] for line in lines).split()) == "".join(text.split())
