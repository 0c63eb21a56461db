"""Queries over real stores: what they read, what they leave out, what they refuse."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import synthetic_run as synthetic
from roots import FolderRoot, Root
from synthetic_run import SyntheticRun, reward_of, synthetic_run

from miles_core.errors import InputError
from miles_core.store.catalog import chosen_runs
from miles_core.store.files import DamagedError, Files
from miles_core.store.questions import QUESTIONS
from miles_core.store.retention import rules
from miles_core.store.sql import Database
from miles_core.store.tombstone import Tombstone, write_tombstone

GROUPS, SAMPLES = 2, 4


def build(root: Root, iterations: int = 2, run: str = "r") -> SyntheticRun:
    made = SyntheticRun(root.files, run, GROUPS, SAMPLES)
    for iteration in range(iterations):
        made.iterate(iteration)
    made.draw_line()
    return made


def ask(files: Files, sql: str, **options: Any) -> list[dict[str, Any]]:
    rows, _ = told(files, sql, **options)
    return rows


def told(files: Files, sql: str, runs: tuple[str, ...] = ("r",), **options: Any) -> tuple[list[dict[str, Any]], str]:
    database = Database(files, runs, sql, **options)
    rows = [row for batch in database.read(database.run()) for row in batch.to_pylist()]
    return rows, "\n".join(database.notes)


def test_a_stage_is_read_with_its_place(root: Root) -> None:
    made = build(root)
    rows = ask(root.files, "SELECT * FROM rewards ORDER BY sample_index")
    assert [row["sample_index"] for row in rows] == list(range(2 * GROUPS * SAMPLES))
    assert [row["reward"] for row in rows] == [reward_of(i, i // SAMPLES) for i in range(len(rows))]
    last = made.store.on_line("rewards", 1)
    assert last is not None
    place = {"run": "r", "iteration": 1, "attempt": last.attempt, "part": "00000001-1", "on_line": True}
    assert rows[-1].items() >= place.items()


def test_attempts_beside_the_line_are_in_the_view_of_all_alone(root: Root) -> None:
    made = build(root)
    other = made.make("rewards", 1, on_line=False, rm_type="ocr", reward=lambda i, g: 9.0)
    count = "SELECT count(*) AS n, max(reward) AS top FROM "
    assert ask(root.files, count + "rewards")[0]["top"] < 1
    assert ask(root.files, count + "rewards_all") == [{"n": 24, "top": 9.0}]
    assert ask(root.files, count + "rewards", attempts=True) == [{"n": 24, "top": 9.0}]
    beside = ask(root.files, "SELECT DISTINCT attempt, score_ocr FROM rewards_all WHERE NOT on_line")
    assert beside == [{"attempt": other.attempt, "score_ocr": 9.0}]
    samples = "SELECT rewards_attempt, count(*) AS n, count(advantage) AS a FROM samples WHERE iteration = 1 GROUP BY 1"
    assert len(ask(root.files, samples)) == 1
    by_attempt = {row["rewards_attempt"]: (row["n"], row["a"]) for row in ask(root.files, samples, attempts=True)}
    assert sorted(by_attempt.values()) == [(8, 0), (8, 8)]
    assert by_attempt[other.attempt] == (8, 0)


def test_leftovers_and_uncommitted_attempts_are_never_read(root: Root) -> None:
    made = build(root)
    manifest = made.store.on_line("rewards", 0)
    assert manifest is not None
    part = root.get(manifest.data[0].path)
    root.put(f"{manifest.folder}/data/00000000-7.parquet", part)
    root.put(f"{manifest.folder}.2/data/00000000-1.parquet", part)
    assert ask(root.files, "SELECT count(*) AS n FROM rewards_all") == [{"n": 16}]


def test_samples_join_what_became_of_a_prompt(root: Root) -> None:
    made = build(root, 1)
    made.make("prompts", 1)
    made.make("rollout", 1)
    made.draw_line()
    rows = ask(root.files, "SELECT * FROM samples ORDER BY sample_index")
    assert len(rows) == 16
    assert rows[5]["reward"] == reward_of(5, 1) and rows[5]["score_jpeg_compressibility"] == rows[5]["reward"]
    assert rows[5]["advantage"] is not None and rows[5]["policy_version"] == -1
    assert rows[12]["policy_version"] == 0 and rows[12]["reward"] is None and rows[12]["on_line"]
    unscored = ask(root.files, QUESTIONS["unscored"].sql)
    rollout = made.line["rollout"].attempt
    assert unscored == [{"run": "r", "iteration": 1, "rollout_attempt": rollout, "on_line": True, "samples": 8}]


def test_manifests_tell_what_is_committed_and_pruned(root: Root) -> None:
    made = build(root)
    rollout = made.store.on_line("rollout", 0)
    assert rollout is not None
    rule = rules(full_checkpoints=2, latents_iterations=1)[0]
    gone = tuple(p.path.removeprefix(rollout.folder + "/") for p in rollout.latents)
    write_tombstone(root.files, rollout.folder, Tombstone(("latents",), 0.0, "old", rule.option, gone, 1))
    for part in rollout.latents:
        root.remove(part.path)
    rows = ask(root.files, "SELECT * FROM manifests WHERE stage = 'rollout' ORDER BY iteration")
    assert [row["pruned"] for row in rows] == ["latents", None]
    assert rows[0]["rows"] == 8 and rows[0]["content_digest"] == rollout.content_digest and rows[0]["on_line"]
    latents, note = told(root.files, "SELECT DISTINCT iteration FROM latents")
    assert latents == [{"iteration": 1}]
    assert "--keep-latents-iterations 1" in note and "miles rerun r ITER rollout" in note


def test_what_a_newer_program_wrote_is_left_out_and_told(root: Root) -> None:
    made = build(root)
    manifest = made.store.on_line("rewards", 0)
    assert manifest is not None
    path = f"{manifest.folder}/manifest.json"
    root.put(path, root.get(path).replace(b'"schema_version": 1', b'"schema_version": 99'))
    rows, note = told(root.files, "SELECT DISTINCT iteration FROM rewards")
    assert rows == [{"iteration": 1}]
    assert "schema version 99" in note


@pytest.mark.parametrize("how", ["missing", "short", "altered"])
def test_a_damaged_part_is_named(root: Root, how: str) -> None:
    made = build(root)
    manifest = made.store.on_line("rewards", 1)
    assert manifest is not None
    path = manifest.data[1].path
    data = root.get(path)
    root.remove(path)
    if how != "missing":
        root.put(path, data[:100] if how == "short" else b"x" * len(data))
    with pytest.raises(DamagedError, match=root.files.url(path)) as fault:
        ask(root.files, "SELECT sum(reward) FROM rewards")
    assert "\n" not in str(fault.value)


def test_tensors_of_several_shapes_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of other schedules stand side by side."""
    files = FolderRoot(tmp_path).files
    synthetic_run(files, "a", 1, 1, 2, 8)
    monkeypatch.setattr(synthetic, "STEPS", 9)
    synthetic_run(files, "b", 1, 1, 2, 8)
    rows = ask(files, "SELECT DISTINCT run, len(sigmas) AS n FROM rollout ORDER BY run", runs=("a", "b"))
    assert rows == [{"run": "a", "n": 7}, {"run": "b", "n": 10}]


def test_columns_that_are_not_asked_for_are_not_read(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic, "picture", lambda *_: bytes(300_000))
    build(root)
    read: list[int] = []
    whole = Files.read_range

    def counted(self: Files, path: str, start: int, stop: int) -> bytes:
        read.append(stop - start)
        return whole(self, path, start, stop)

    monkeypatch.setattr(Files, "read_range", counted)
    database = Database(root.files, ["r"], "SELECT avg(seconds) FROM rollout WHERE iteration = 1")
    opening = sum(read)
    list(database.read(database.run()))
    narrow = sum(read) - opening
    read.clear()
    ask(root.files, "SELECT * FROM rollout")
    assert narrow < (sum(read) - opening) / 10


@pytest.mark.parametrize("name", QUESTIONS)
def test_every_question_is_answered(name: str, tmp_path: Path) -> None:
    root = FolderRoot(tmp_path)
    made = build(root, 2)
    made.make("prompts", 2)
    made.make("rollout", 2)
    made.draw_line()
    rows = ask(root.files, QUESTIONS[name].sql)
    assert bool(rows) != (name in ("repeated-seeds", "changed-rewards", "reward-outliers")), rows
    if name == "zero-std-prompts":
        assert [(row["prompt"], row["groups"], row["their_reward"]) for row in rows] == [("a grey cow", 1, 0.5)]
    if name == "worst-groups":
        assert rows[0]["mean"] == min(row["mean"] for row in rows) < rows[-1]["mean"]
    if name == "failed-rewards":
        assert [row["sample_index"] for row in rows] == [7]


OF_ALL_OR_SINGLE_ROWS = ("times-by-stage", "changed-rewards", "reward-outliers", "failed-rewards")


def rounded(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Threads add up means and spreads in any order: 12 digits of them."""
    return [{k: float(f"{v:.12g}") if isinstance(v, float) else v for k, v in row.items()} for row in rows]


@pytest.mark.parametrize("name", [n for n in QUESTIONS if n not in OF_ALL_OR_SINGLE_ROWS])
def test_no_figure_of_a_question_mixes_attempts(name: str, tmp_path: Path) -> None:
    """What is said of the line stays what it is when attempts that differ in everything stand beside it."""
    root = FolderRoot(tmp_path)
    made = build(root, 2)
    line = rounded(ask(root.files, QUESTIONS[name].sql))
    others = [made.make(stage, 1, on_line=False, mark=1) for stage in ("prompts", "rollout", "update")]
    for factor in (2, 3):
        others.append(made.make("rewards", 1, on_line=False, reward=lambda i, g, f=factor: f * reward_of(i, g)))
        made.line["rewards"], standing = others[-1], made.line["rewards"]
        others.append(made.make("advantages", 1, on_line=False, mark=factor))
        made.line["rewards"] = standing
    every = rounded(ask(root.files, QUESTIONS[name].sql, attempts=True))
    beside = {m.attempt for m in others}
    of_the_line = [row for row in every if row.get("beside") is None and row.get("on_line", True)]
    assert of_the_line == line
    for row in every:
        named = {row.get(key) for key in ("attempt", "rollout_attempt", "rewards_attempt", "advantages_attempt")}
        named |= set((row.get("beside") or "").split())
        assert row in line or named & beside, row


def test_changed_rewards_are_those_of_one_image(root: Root) -> None:
    made = build(root)
    question = QUESTIONS["changed-rewards"].sql
    standing = made.line["rewards"].attempt
    made.make("rewards", 1, on_line=False, mark="as it was")
    assert ask(root.files, question) == []
    other = made.make("rewards", 1, on_line=False, reward=lambda i, g: 9.0 if i == 10 else reward_of(i, g))
    (row,) = ask(root.files, question)
    assert (row["run"], row["iteration"], row["sample_index"], row["prompt"]) == ("r", 1, 10, "a green pig")
    assert row["rewards"][0] == reward_of(10, 2) and row["attempts"][0] == standing
    assert dict(zip(row["attempts"], row["rewards"], strict=True))[other.attempt] == 9.0
    assert sorted(row["rewards"]) == sorted([reward_of(10, 2), reward_of(10, 2), 9.0])
    assert ask(root.files, question, attempts=True) == [row]


def test_reward_outliers_are_far_from_the_runs_rewards_of_their_scorer(root: Root) -> None:
    made = SyntheticRun(root.files, "r", GROUPS, SAMPLES)
    made.iterate(0)
    for stage in ("prompts", "rollout"):
        made.make(stage, 1)
    # Over iteration 1 the median is 0.5 and the median absolute deviation 0.02.
    values = [0.46, 0.48, 0.48, 0.5, 0.5, 0.52, 0.54, 0.5 + 9 * 0.02]
    made.make("rewards", 1, rm_type="ocr", reward=lambda i, g: values[i - 8])
    made.draw_line()
    question = QUESTIONS["reward-outliers"].sql
    (row,) = ask(root.files, question)
    assert (row["iteration"], row["sample_index"], row["rm_type"], row["rm_version"]) == (1, 15, "ocr", "ocr-1")
    assert row["median"] == pytest.approx(0.5) and row["spread"] == pytest.approx(0.02)
    assert row["spreads_away"] == pytest.approx(9) and row["scorer_seconds"] == pytest.approx(0.01)
    made.make("rewards", 1, on_line=False, rm_type="jpeg", reward=lambda i, g: 100.0 if i == 9 else 0.0)
    beside = [r for r in ask(root.files, question, attempts=True) if not r["on_line"]]
    assert [(r["sample_index"], r["spread"], r["spreads_away"]) for r in beside] == [(9, 12.5, 8.0)]
    made.make("rewards", 1, on_line=False, rm_type="flat", reward=lambda i, g: 1.0)
    assert [r for r in ask(root.files, question, attempts=True) if r["rm_type"] == "flat"] == []


def test_questions_of_an_empty_run_have_no_rows(tmp_path: Path) -> None:
    files = FolderRoot(tmp_path).files
    SyntheticRun(files, "r", GROUPS, SAMPLES)
    for name, asked in QUESTIONS.items():
        assert ask(files, asked.sql) == [] or name == "times-by-stage"


REFUSED = {
    "COPY (SELECT 1) TO '{folder}/x.csv'": "COPY",
    "ATTACH '{folder}/x.db'": "ATTACH",
    "INSTALL httpfs": "LOAD",
    "EXPORT DATABASE '{folder}/x'": "EXPORT",
    "CREATE TABLE x AS SELECT 1": "CREATE",
    "SET enable_external_access = true": "SET",
    "SELECT 1; COPY (SELECT 1) TO '{folder}/x.csv'": "COPY",
    "SELECT 1; SELECT 2": "one at a time",
    "SELECT * FROM read_csv('{folder}/f')": "disabled",
    "": "no statement",
    "SELECT 1 frm x": "line 1, column 14",
    "SELECT *\nFROM rewards\nWHERE iteration = = 3": "line 3, column 19",
    "SELECT rewrd FROM rewards": "line 1, column 8.*reward",
    "SELECT * FROM reward": "line 1, column 15",
    "SELECT CAST(worker AS INT) FROM rewards": "reward-0",
}


@pytest.mark.parametrize("sql", REFUSED)
def test_what_would_write_or_is_wrong_is_refused_in_a_sentence(sql: str, tmp_path: Path) -> None:
    root = FolderRoot(tmp_path)
    build(root, 1)
    root.put("f", b"secret")
    before = root.names()
    with pytest.raises(InputError, match=REFUSED[sql]) as fault:
        ask(root.files, sql.format(folder=tmp_path))
    assert "\n" not in str(fault.value)
    assert root.names() == before


def test_runs_by_name(root: Root) -> None:
    build(root, 1, "a")
    build(root, 1, "b")
    assert chosen_runs(root.files, []) == chosen_runs(root.files, ["all"]) == ["a", "b"]
    assert chosen_runs(root.files, ["b", "b"]) == ["b"]
    with pytest.raises(InputError, match="no run c"):
        chosen_runs(root.files, ["c"])


def test_the_parts_are_what_other_readers_see(tmp_path: Path) -> None:
    root = FolderRoot(tmp_path)
    made = build(root, 1)
    manifest = made.store.on_line("advantages", 0)
    assert manifest is not None
    plain = pa.concat_tables([pq.read_table(root.files.url(p.path)) for p in manifest.data]).to_pylist()
    assert ask(root.files, f"SELECT {', '.join(plain[0])} FROM advantages ORDER BY sample_index") == plain
