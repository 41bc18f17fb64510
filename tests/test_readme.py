"""What the READMEs say exists: files, keys with their values, options of the tools, links, modules, figures."""

import re
from functools import cache
from pathlib import Path

import pytest

import warm
from benchmarks import table
from minitron.config import cli
from readmes import READMES, ROOT, blocks

SECTIONS = "model|parallel|train|precision|optimizer|data|checkpoint|log|profile|finetune|lora"
FOLDERS = "launch|configs|tools|benchmarks|tests|minitron"
MADE_LATER = {"launch/jube/nlp_benchmark_run", "configs/NAME.yaml"}  # by JUBE, by whoever adds a recipe
readmes = pytest.mark.parametrize("readme", READMES, ids=lambda path: str(path.relative_to(ROOT)))


@cache
def typed(readme: Path) -> list[str]:
    """Each command of the shell, its lines joined, and each code span; of a table that begins with what users used to
    type, what they type now."""
    commands = [line.split("  #")[0] for block in blocks(readme) for line in re.sub(r"\\\n\s*", "", block).splitlines()]
    old = None
    for line in prose(readme).splitlines():
        cells = re.split(r"(?<!\\)\|", line)[1:-1] if line.startswith("|") else []
        if not cells:
            old = None
        elif any("you used to type" in cell for cell in cells):
            old = next(i for i, cell in enumerate(cells) if "you used to type" in cell)
        commands += re.findall(r"`([^`]+)`", "|".join(cells[old + 1 :]) if old is not None else line)
    return commands


def prose(readme: Path) -> str:
    """Return what lies outside of code blocks."""
    return re.sub(r"^```.*?^```$", "", readme.read_text(), flags=re.M | re.S)


def everywhere() -> list[str]:
    return [text for readme in READMES for text in typed(readme)]


def test_there_is_a_readme_where_the_thing_lies():
    folders = {readme.parent.name for readme in READMES if readme.parent != ROOT}
    assert folders == set(FOLDERS.split("|"))
    assert len((ROOT / "README.md").read_text().splitlines()) < 180


def test_the_main_readme_begins_with_two_commands():
    lines = blocks(ROOT / "README.md")[0].splitlines()
    assert [line.split("  ")[0] for line in lines] == ["bash launch/quickstart.sh", "bash tests/run.sh"]


@readmes
def test_the_files_are_there(readme):
    paths = {path for text in typed(readme) for path in re.findall(rf"(?<![\w/.-])(?:{FOLDERS})/[\w./-]*\w", text)}
    assert not [path for path in sorted(paths - MADE_LATER) if not (ROOT / path).exists()]


@readmes
def test_the_links_lead_somewhere(readme):
    links = re.findall(r"\]\(([^)\s]+)\)", prose(readme))
    for link in links:
        path, _, anchor = link.partition("#")
        target = (readme.parent / path).resolve() if path else readme
        assert target.exists(), f"{link}: there is no {path}"
        if anchor:
            titles = re.findall(r"^#+ (.+)$", prose(target), re.M)
            anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert anchor in anchors, f"{link}: {path} has no such heading"


@readmes
def test_the_keys_are_there_and_take_the_values(readme):
    words = {
        word
        for text in typed(readme)
        if not text.startswith("error:")
        for word in re.findall(
            rf"(?<![\w/.-])(?:{SECTIONS})\.[a-z_]\w*(?:\.\w+)*(?:=(?:\[\[.*?\]\]|\[.*?\]|[^\s,|\"}}]+))?", text
        )
        if not word.endswith((".py", ".md", ".jsonl"))
    }
    defaults = cli.to_yaml(cli.load([]))
    for word in words:
        section, name, value = re.fullmatch(r"(\w+)\.(\w+)[\w.]*(=.*)?", word).groups()
        assert re.search(rf"^{section}:\n(  .*\n)*?  {name}:", defaults, re.M), word
        if value and not re.fullmatch(r"=([A-Z]+|\.\.\.)", value):  # placeholders
            cli.load([word])


def test_planned_jobs_have_the_batch_of_their_size():
    """2,048 GPUs with a batch for 128 would be another job: two samples a GPU, as launch/ starts them."""
    texts = [text for readme in READMES for text in typed(readme)]
    texts += [
        line
        for path in (ROOT / "tools/plan.py", ROOT / "minitron/planner/dryrun/dryrun.py")
        for line in path.read_text().splitlines()
    ]
    found = 0
    for text in texts:
        if (named := re.search(r"(configs/[a-z0-9_]+\.yaml)(.*) --world (\d+)", text)) and "one_rank" not in text:
            keys = re.findall(r"[a-z]+\.\w+=\S+", named[2])
            cfg = cli.load([str(ROOT / named[1]), *keys])
            assert cfg.train.global_batch_size >= 2 * int(named[3]), text
            found += 1
    assert found >= 8


def test_there_is_much_to_check():
    """The patterns above find what they look for."""
    texts = " ".join(everywhere())
    assert len(set(re.findall(rf"(?:{FOLDERS})/[\w./-]*\w", texts))) > 100
    assert len(set(re.findall(rf"(?:{SECTIONS})\.[a-z_]\w*", texts))) > 60
    assert sum(len(re.findall(r"\]\([^)\s]+\)", prose(readme))) for readme in READMES) > 40


TOOLS = {path for text in everywhere() if " --" in text for path in re.findall(r"(?:tools|benchmarks)/\w+\.py", text)}


@pytest.mark.parametrize("tool", sorted(TOOLS))
def test_the_options_are_there(tool):
    options = {
        option
        for text in everywhere()
        if tool in text
        for option in re.findall(r"(?<=\s)--[\w-]+", text[text.index(tool) :])
    }
    shown = warm.run(ROOT / tool, "--help").stdout
    assert not [option for option in options if not re.search(rf"(?<![\w-]){option}(?![\w-])", shown)]


def test_the_map_of_the_code_names_every_module():
    """A folder's table names its files and no other; READMEs of other folders name their programs and recipes."""
    package = ROOT / "minitron"
    sections = re.findall(r"^### `([\w/]+)/`\n\n((?:\|.*\n)+)", prose(package / "README.md"), re.M)
    rooms = {room: re.findall(r"^\| `(\w+\.py)` \| .", rows, re.M) for room, rows in sections}
    assert rooms.keys() == {str(path.parent.relative_to(package)) for path in package.rglob("__init__.py")} - {"."}
    for room, named in rooms.items():
        assert sorted(named) == sorted(p.name for p in (package / room).glob("*.py") if p.name != "__init__.py"), room
    named = re.findall(r"`((?:\w+/)+\w+\.py)`", prose(package / "README.md"))
    assert len(named) > 20 and not [name for name in named if not any((top / name).exists() for top in (ROOT, package))]
    for folder in ("tools", "benchmarks"):
        text = (ROOT / folder / "README.md").read_text()
        programs = [path.name for path in (ROOT / folder).glob("*.py") if '__name__ == "__main__"' in path.read_text()]
        assert programs and not [name for name in programs if f"{folder}/{name}" not in text]
    for recipe in (ROOT / "configs").glob("*.yaml"):
        assert f"`{recipe.name}`" in (ROOT / "configs" / "README.md").read_text()


def test_the_speed_rows_are_the_records():
    """Each row of the main README has the figures and the command of its record, and its versions are named below."""
    text = (ROOT / "README.md").read_text()
    newest = [e for e in table.newest(table.RESULTS) if e["peer"] == "megatron"]
    named = {
        (table.in_words(e["case"]), f"{e['ours']['world']} {table.gpu_of(e)}", table.precision_of(e, "ours")): e
        for e in newest
    }
    rows = [re.split(r" ?\| ?", row)[1:-1] for row in re.findall(r"^\| (?:Llama|GPT).*\| `benchmarks.*\|$", text, re.M)]
    assert len(rows) > 1 and len(named) == len(newest)
    ratios = []
    for *case, ours, peer, ratio, command in rows:
        e = named[*case]
        spread = f" ± {e['spread']:.3f}" if "spread" in e else ""
        figures = f"{e['ours_mfu']:.1f} %", f"{e['peer_mfu']:.1f} %", f"{e['ratio']:.3f}{spread}", f"`{e['command']}`"
        assert (ours, peer, ratio, command) == figures, case
        ratios.append(e["ratio"])
        assert e["power_limit_watts"] == 700.0
        versions = e["versions"]
        used = [versions[name] for name in ("cuda", "torch", "triton", "transformer_engine", "megatron-core")]
        for figure in (e["time"][:10], e["commit"][:7], *used):
            assert figure in text, figure
    assert ratios == sorted(ratios, reverse=True)
    (head,) = (e for e in newest if e["case"] == "8b-1gpu-fp8head-fp8")
    assert f"{head['ratio']:.3f} ± {head['spread']:.3f}" in text and f"one case of {len(newest)}, the peer" in text
    assert [e["case"] for e in newest if e["ratio"] and e["ratio"] < 1] == ["175b-tp4-fp8"]
    assert (table.RESULTS.parent / "compare.md").read_text() == table.markdown(table.newest(table.RESULTS))
    assert (table.RESULTS.parent / "steps.md").read_text() == table.steps(table.records(table.RESULTS))
