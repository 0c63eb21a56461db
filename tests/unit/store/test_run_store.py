"""Attempts, manifests, the Cached rule, the line."""

import json
from dataclasses import replace
from typing import Any

import pytest
from roots import Root

from miles_core.errors import InputError
from miles_core.store.lock import LockLost
from miles_core.store.manifest import Manifest, fingerprint, stage_digest
from miles_core.store.parts import Part, write_file
from miles_core.store.run_store import RunStore, check_run_id, runs


@pytest.fixture
def store(root: Root) -> RunStore:
    return RunStore(root.files, "r")


def commit(
    store: RunStore, mark: str, content: bytes = b"{}", upstream: dict[str, Manifest] | None = None, **more: Any
) -> Manifest:
    """Commit an attempt at advantages whose fingerprint is made of `mark`."""
    name = fingerprint("advantages", 0, config={"mark": mark}, inputs={}, hooks={}, upstream={})
    attempt = store.open_attempt("advantages", 0, name, upstream or {}, resumable=False)
    part = write_file(store.files, attempt.path("data/a.json"), content)
    arguments: dict[str, Any] = {"affecting_config": {}, "inputs": {}, "versions": {}, "summary": {}}
    return store.commit(
        attempt,
        parts=[part],
        upstream=upstream or {},
        started_at=0.0,
        flow_run_id=None,
        **(arguments | more),
    )


def test_a_manifest_reads_back(store: RunStore) -> None:
    made = commit(store, "a", summary={"mean": 0.5})
    assert store.manifest("advantages", 0, made.attempt) == made
    body = json.loads(store.files.read(f"{made.folder}/manifest.json"))
    wanted = (
        "schema_version stage run iteration fingerprint content_digest parts upstream affecting_config versions times"
    )
    assert set(wanted.split()) <= set(body)
    assert body["parts"][0]["path"] == "data/a.json"


def test_a_copied_run_is_whole_under_another_name(store: RunStore, root: Root) -> None:
    made = commit(store, "a")
    for name in root.names():
        root.put(name.replace("r/", "copy/", 1), root.get(name))
    copied = RunStore(store.files, "copy").manifest("advantages", 0, made.attempt)
    assert copied is not None
    assert RunStore(store.files, "copy").damage(copied) is None
    assert copied.parts[0].path.startswith("copy/")


def test_cached_means_same_fingerprint_and_same_upstream_digests(store: RunStore) -> None:
    first, second = commit(store, "rewards", b"1"), commit(store, "other", b"2")
    made = commit(store, "a", upstream={"rewards": first})
    assert store.find("advantages", 0, made.fingerprint, {"rewards": first}) == made
    assert store.find("advantages", 0, made.fingerprint, {"rewards": second}) is None
    assert store.find("advantages", 0, "0" * 64, {"rewards": first}) is None


def test_another_upstream_gets_a_folder_beside(store: RunStore) -> None:
    first, second = commit(store, "rewards", b"1"), commit(store, "other", b"2")
    one, two = commit(store, "a", upstream={"rewards": first}), commit(store, "a", upstream={"rewards": second})
    assert two.attempt == f"{one.attempt}.2"
    assert store.find("advantages", 0, one.fingerprint, {"rewards": first}) == one


def test_without_a_manifest_there_is_no_stage(store: RunStore) -> None:
    attempt = store.open_attempt("advantages", 0, "f" * 64, {}, resumable=True)
    write_file(store.files, attempt.path("data/a.json"), b"{}")
    assert store.find("advantages", 0, "f" * 64, {}) is None
    assert store.committed("advantages", 0) == []


def test_a_resumable_attempt_goes_on_and_another_gets_a_fresh_folder(store: RunStore) -> None:
    first = store.open_attempt("rollout", 0, "f" * 64, {}, resumable=True)
    assert store.open_attempt("rollout", 0, "f" * 64, {}, resumable=True) == first
    assert store.open_attempt("rollout", 0, "f" * 64, {}, resumable=False).name == f"{first.name}.2"


def test_the_loser_of_a_race_gets_the_winners_manifest(store: RunStore) -> None:
    attempt = store.open_attempt("rollout", 0, "f" * 64, {}, resumable=True)
    arguments: dict[str, Any] = {
        "upstream": {},
        "affecting_config": {},
        "inputs": {},
        "versions": {},
        "summary": {},
        "started_at": 0.0,
        "flow_run_id": None,
    }
    parts = [write_file(store.files, attempt.path(f"data/{i}.json"), str(i).encode()) for i in range(2)]
    winner = store.commit(attempt, parts=parts[:1], **arguments)
    loser = store.commit(attempt, parts=parts[1:], **arguments)
    assert loser == winner
    assert len(winner.parts) == 1


@pytest.mark.parametrize("how", ["gone", "short"])
def test_a_damaged_attempt_is_not_reused(store: RunStore, root: Root, how: str) -> None:
    made = commit(store, "a", b"content")
    path = made.parts[0].path
    assert store.find("advantages", 0, made.fingerprint, {}) == made
    root.remove(path)
    if how == "short":
        root.put(path, b"c")
    assert store.files.url(path) in (store.damage(made) or "")
    assert store.find("advantages", 0, made.fingerprint, {}) is None


def test_a_manifest_of_a_newer_schema_is_refused(store: RunStore, root: Root) -> None:
    made = commit(store, "a")
    path = f"{made.folder}/manifest.json"
    root.put(path, json.dumps(json.loads(root.get(path)) | {"schema_version": 99}).encode())
    with pytest.raises(InputError, match="schema version 99"):
        store.manifest("advantages", 0, made.attempt)


def test_the_line_names_an_attempt(store: RunStore) -> None:
    store.create_record({"recipe": "tiny", "config": {}, "meaning": {}})
    made = commit(store, "a")
    assert store.on_line("advantages", 0) is None
    store.move_line(made)
    assert store.on_line("advantages", 0) == made
    assert runs(store.files) == ["r"]


def test_content_digest_ignores_attempt_names_and_times(root: Root) -> None:
    one, two = (commit(RunStore(root.files, n), "a") for n in ("x", "y"))
    assert one.content_digest == two.content_digest
    assert one.times != two.times or one.run != two.run


@pytest.mark.parametrize("name", ["../../x", "", "/abs", "a/b", ".hidden", "a" * 101, "a\n", "a b"])
def test_a_name_that_could_lead_outside_is_refused(name: str) -> None:
    with pytest.raises(InputError):
        check_run_id(name)


@pytest.mark.parametrize(
    "change",
    [{"config": {"a": 2}}, {"inputs": {"f": "2"}}, {"hooks": {"h": "2"}}, {"upstream": {"u": "2"}}],
)
def test_everything_that_matters_enters_the_fingerprint(change: dict[str, Any]) -> None:
    base: dict[str, Any] = {"config": {"a": 1}, "inputs": {"f": "1"}, "hooks": {"h": "1"}, "upstream": {"u": "1"}}
    assert fingerprint("rewards", 0, **base) == fingerprint("rewards", 0, **base)
    assert fingerprint("rewards", 0, **base) != fingerprint("rewards", 0, **(base | change))
    assert fingerprint("rewards", 0, **base) != fingerprint("rewards", 1, **base)
    assert fingerprint("rewards", 0, **base) != fingerprint("rollout", 0, **base)


@pytest.mark.parametrize("name", [".DS_Store", ".nfs0000000001", "x.bak", "ffffffffffff.two"])
def test_a_stray_name_is_no_attempt(store: RunStore, root: Root, name: str) -> None:
    made = commit(store, "a")
    root.put(f"{made.folder.rsplit('/', 1)[0]}/{name}/file", b"")
    assert store.attempts("advantages", 0) == [made.attempt]


@pytest.mark.parametrize("content", ["", "null", "5", '"x"', "[]", "{}", '{"schema_version": 1, "upstream": []}'])
def test_what_is_no_manifest_is_no_commit(store: RunStore, root: Root, content: str) -> None:
    made = commit(store, "a")
    root.put(f"{made.folder}/manifest.json", content.encode())
    assert store.committed("advantages", 0) == []
    assert commit(store, "a").attempt == f"{made.attempt}.2"


@pytest.mark.parametrize("content", ["", "null", "[]", '{"schema_version": 1}', '{"schema_version": "x"}'])
def test_what_is_no_run_record_is_refused(store: RunStore, root: Root, content: str) -> None:
    root.put("r/run.json", content.encode())
    with pytest.raises(InputError, match="is no run record"):
        store.record()


def test_a_product_is_found_by_its_content_when_its_attempt_is_damaged(store: RunStore, root: Root) -> None:
    first = commit(store, "a", b"content")
    consumed = first.as_upstream()
    assert store.product(consumed) == first
    root.remove(first.parts[0].path)
    assert store.product(consumed) is None
    again = commit(store, "a", b"content")
    assert store.product(consumed) == again


@pytest.mark.parametrize("folder", ["data", "latents"])
def test_rows_count_by_place_and_content_and_never_by_name(folder: str) -> None:
    """The number of the try in a part's name is another after a crash."""

    def digest(*parts: tuple[str, str]) -> str:
        return stage_digest("f", tuple(Part(f"f/{name}", 1, 1, "s", content) for name, content in parts))

    other = ("state.json", "x")
    names = (f"{folder}/00000000-1.parquet", f"{folder}/00000001-1.parquet")
    base = digest((names[0], "a"), (names[1], "b"), other)
    assert digest((f"{folder}/00000001-7.parquet", "b"), (f"{folder}/00000000-2.parquet", "a"), other) == base
    assert digest((names[0], "b"), (names[1], "a"), other) != base
    assert digest((names[0], "a"), other) != base
    assert digest(("conditioning/a.parquet", "a")) != digest(("conditioning/b.parquet", "a"))
    both = digest(("data/0-1.parquet", "a"), ("latents/0-1.parquet", "b"))
    assert both != digest(("data/0-1.parquet", "b"), ("latents/0-1.parquet", "a"))


def test_who_trains_and_who_reruns_never_write_into_one_folder(store: RunStore) -> None:
    training = replace(store, epoch=3)
    beside = store.open_attempt("rollout", 0, "f" * 64, {}, resumable=True)
    mine = training.open_attempt("rollout", 0, "f" * 64, {}, resumable=True)
    assert mine.folder != beside.folder
    assert replace(store, epoch=4).open_attempt("rollout", 0, "f" * 64, {}, resumable=True) == mine
    assert store.open_attempt("rollout", 0, "f" * 64, {}, resumable=True) == beside


def test_a_command_of_an_older_epoch_does_not_move_the_line(store: RunStore) -> None:
    """A zombie: paused while another took the run over, it finds its manifest useless and the line as it was."""
    store.create_record({"recipe": "tiny", "config": {}, "meaning": {}, "epoch": 1})
    made = commit(store, "a")
    old, new = replace(store, epoch=1), replace(store, epoch=2)
    new.update_record(lambda record: record | {"epoch": 2})
    with pytest.raises(LockLost, match="taken over by another command"):
        old.move_line(made)
    assert store.on_line("advantages", 0) is None
    new.move_line(made)
    assert store.on_line("advantages", 0) == made
