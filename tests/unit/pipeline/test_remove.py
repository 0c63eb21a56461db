"""A run is deleted as a whole, on disk and in a bucket, and not from under anybody."""

import pytest
from lines import Line
from roots import Root

from flows.cli import remove as command
from miles_core.errors import InputError
from miles_core.pipeline.fork import begin_fork, plan_fork
from miles_core.pipeline.remove import remove_run
from miles_core.store.forks import forks_of
from miles_core.store.lock import RunLock
from miles_core.store.run_store import runs


def fork(parent: Line, name: str) -> Line:
    begin_fork(plan_fork(parent.store, parent.config, "1", name))
    return Line.open(parent.root, name)


def test_nothing_of_it_is_left_and_nothing_else_goes(root: Root, places: dict[str, str]) -> None:
    other, gone = Line.begin(root, places, "other"), Line.begin(root, places, "gone")
    for run in (other, gone):
        run.iterate(0)
    before = other.bytes()
    remove_run(gone.store)
    assert runs(root.files) == ["other"]
    assert not [name for name in root.names() if name.startswith("gone/")]
    assert other.bytes() == before
    Line.begin(root, places, "gone").iterate(0)


def test_a_parent_waits_for_its_forks(three: Line) -> None:
    child = fork(three, "child")
    before = three.bytes()
    with pytest.raises(InputError, match="its forks child begin with: remove these first"):
        remove_run(three.store)
    assert three.bytes() == before
    remove_run(child.store)
    assert forks_of(three.store) == {}
    assert not three.root.files.list(f"{three.store.run}/forks")
    remove_run(three.store)
    assert runs(three.root.files) == []


def test_one_that_is_trained_is_left_alone(three: Line) -> None:
    lock, before = RunLock(three.store.files, three.store.run), three.bytes()
    lock.take()
    held = three.bytes()
    with pytest.raises(InputError, match="is being trained: end that by `miles stop"):
        remove_run(three.store)
    assert three.bytes() == held != before
    lock.release()
    remove_run(three.store)


def test_an_interrupted_removal_is_given_again(three: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = type(three.store.files).remove_tree, []

    def once(files: object, path: str) -> None:
        if calls:
            raise KeyboardInterrupt
        calls.append(path)
        real(three.store.files, path)

    with monkeypatch.context() as patched:
        patched.setattr(type(three.store.files), "remove_tree", once)
        with pytest.raises(KeyboardInterrupt):
            remove_run(three.store)
    assert runs(three.root.files) == [three.store.run]
    remove_run(three.store)
    assert not [name for name in three.root.names() if name.startswith(f"{three.store.run}/")]


def test_the_command_says_what_would_go(three: Line, capsys: pytest.CaptureFixture[str]) -> None:
    run, root = three.store.run, three.root.files.root
    before = three.bytes()
    with pytest.raises(InputError, match="3 iterations, at .* would be deleted for good: give --yes as well"):
        command.remove(run, yes=False, artifact_root=root)
    with pytest.raises(InputError, match=f"latest is run {run} at present"):
        command.remove("latest", yes=True, artifact_root=root)
    assert three.bytes() == before
    command.remove(run, yes=True, artifact_root=root)
    assert "was deleted" in capsys.readouterr().out
    with pytest.raises(InputError, match="there is no run"):
        command.remove(run, yes=True, artifact_root=root)
