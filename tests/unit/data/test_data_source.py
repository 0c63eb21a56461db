"""The stock data source: order, seeds, exact position, buffer, and the prompts table."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from miles_core.data.data_source import (
    DrawnSample,
    RolloutDataSourceWithBuffer,
    pop_first,
    sample_seed,
    samples_to_table,
    table_to_samples,
)
from miles_core.data.sample import Sample
from miles_core.errors import InputError
from miles_core.store.files import Files
from miles_core.store.parts import read_table, write_table
from miles_core.store.schemas import PROMPTS

COUNT, N = 7, 3


@pytest.fixture
def args(tmp_path: Path) -> SimpleNamespace:
    rows = [{"input": f"prompt {i}", "metadata": {"number": i}} for i in range(COUNT)]
    rows[1]["metadata"]["rm_type"] = "jpeg_incompressibility"  # type: ignore[index]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return SimpleNamespace(
        prompt_data=str(path),
        input_key="input",
        metadata_key="metadata",
        rm_type="jpeg_compressibility",
        rollout_seed=42,
        n_samples_per_prompt=N,
    )


def drawn(groups: list[list[Sample]]) -> list[tuple[int, int]]:
    """(epoch, prompt_index) of each group."""
    pairs = []
    for group in groups:
        assert all(isinstance(sample, DrawnSample) for sample in group)
        first = group[0]
        assert isinstance(first, DrawnSample)
        pairs.append((first.epoch, first.prompt_index))
    return pairs


class TestOrder:
    def test_each_epoch_visits_every_prompt_once(self, args: SimpleNamespace) -> None:
        visits = drawn(RolloutDataSourceWithBuffer(args).get_samples(3 * COUNT))
        for epoch in range(3):
            inside = [p for e, p in visits if e == epoch]
            assert sorted(inside) == list(range(COUNT))
        assert [e for e, _ in visits] == [0] * COUNT + [1] * COUNT + [2] * COUNT

    def test_pitfall_20_prompts_are_shuffled_and_no_epoch_repeats_another(self, args: SimpleNamespace) -> None:
        visits = drawn(RolloutDataSourceWithBuffer(args).get_samples(6 * COUNT))
        orders = [tuple(p for e, p in visits if e == epoch) for epoch in range(6)]
        assert tuple(range(COUNT)) not in orders
        assert len(set(orders)) == 6
        assert len({order[:2] for order in orders}) > 1

    def test_the_order_is_the_seeds(self, args: SimpleNamespace) -> None:
        same = [drawn(RolloutDataSourceWithBuffer(args).get_samples(COUNT)) for _ in range(2)]
        args.rollout_seed = 43
        other = drawn(RolloutDataSourceWithBuffer(args).get_samples(COUNT))
        assert same[0] == same[1] != other

    def test_a_batch_that_crosses_the_epochs_end_goes_on_in_the_next(self, args: SimpleNamespace) -> None:
        source = RolloutDataSourceWithBuffer(args)
        batches = [source.get_samples(5) for _ in range(3)]
        assert [len(b) for b in batches] == [5, 5, 5]
        assert [e for e, _ in drawn(batches[1])] == [0, 0, 1, 1, 1]
        assert drawn([group for batch in batches for group in batch]) == drawn(
            RolloutDataSourceWithBuffer(args).get_samples(15)
        )

    def test_a_batch_larger_than_the_file(self, args: SimpleNamespace) -> None:
        assert len(RolloutDataSourceWithBuffer(args).get_samples(2 * COUNT + 1)) == 2 * COUNT + 1


class TestGroupsAndSeeds:
    def test_a_group_is_n_samples_of_one_prompt_numbered_through_the_run(self, args: SimpleNamespace) -> None:
        source = RolloutDataSourceWithBuffer(args)
        groups = source.get_samples(4) + source.get_samples(9)
        assert [g[0].group_index for g in groups] == list(range(13))
        for number, group in enumerate(groups):
            assert [s.index for s in group] == [number * N + offset for offset in range(N)]
            assert {s.group_index for s in group} == {number}
            assert len({s.prompt for s in group}) == 1
            assert group[0].prompt == f"prompt {group[0].metadata['number']}"

    def test_pitfall_19_the_members_of_a_group_have_seeds_of_their_own(self, args: SimpleNamespace) -> None:
        for group in RolloutDataSourceWithBuffer(args).get_samples(5):
            assert [s.seed - group[0].seed for s in group] == list(range(N))

    def test_pitfall_35_no_two_samples_of_a_run_share_a_seed(self, args: SimpleNamespace) -> None:
        source = RolloutDataSourceWithBuffer(args)
        batches = [source.get_samples(5) for _ in range(8)]
        assert max(e for e, _ in drawn(batches[-1])) >= 2
        seeds = [s.seed for batch in batches for group in batch for s in group]
        assert len(set(seeds)) == len(seeds) == 8 * 5 * N
        assert seeds == [42 + s.index for batch in batches for group in batch for s in group]

    def test_seeds_wrap_at_two_to_the_31(self) -> None:
        assert sample_seed(2**31 - 1, 0, 4, 0) == 2**31 - 1
        assert sample_seed(2**31 - 1, 0, 4, 1) == 2**31
        assert sample_seed(2**31 - 1, 1, 4, 2) == 5
        assert sample_seed(7, 2**30, 2, 1) == 8

    def test_pitfall_21_prompts_of_the_same_text_are_groups_of_their_own(
        self, args: SimpleNamespace, tmp_path: Path
    ) -> None:
        args.prompt_data = str(tmp_path / "twice.txt")
        Path(args.prompt_data).write_text("a cat\na cat\n")
        groups = RolloutDataSourceWithBuffer(args).get_samples(4)
        assert {s.prompt for g in groups for s in g} == {"a cat"}
        again = table_to_samples(samples_to_table(groups))
        assert [[s.index for s in g] for g in again] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]

    def test_samples_do_not_share_their_metadata(self, args: SimpleNamespace) -> None:
        source = RolloutDataSourceWithBuffer(args)
        first = source.get_samples(COUNT)
        for group in first:
            group[0].metadata["number"] = "changed"
            assert isinstance(group[1].metadata["number"], int)
        assert all(isinstance(s.metadata["number"], int) for g in source.get_samples(COUNT) for s in g)


class TestState:
    @pytest.mark.parametrize("before", [0, 1, COUNT - 1, COUNT, COUNT + 1, 3 * COUNT])
    def test_a_loaded_position_goes_on_as_if_never_left(self, args: SimpleNamespace, before: int) -> None:
        whole = RolloutDataSourceWithBuffer(args)
        whole.get_samples(before)
        state = json.loads(json.dumps(whole.state_dict()))
        resumed = RolloutDataSourceWithBuffer(args)
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        for _ in range(4):
            assert resumed.get_samples(5) == whole.get_samples(5)
        again = RolloutDataSourceWithBuffer(args)
        again.load_state_dict(json.loads(json.dumps(resumed.state_dict())))
        assert again.get_samples(5) == whole.get_samples(5)

    def test_the_buffer_is_part_of_the_state(self, args: SimpleNamespace) -> None:
        source = RolloutDataSourceWithBuffer(args)
        groups = source.get_samples(4)
        groups[1][0].reward, groups[1][0].remove_sample = 0.5, True
        source.add_samples([groups[1], groups[3]])
        resumed = RolloutDataSourceWithBuffer(args)
        resumed.load_state_dict(json.loads(json.dumps(source.state_dict())))
        assert [g[0].group_index for g in resumed.buffer] == [1, 3]
        served, expected = resumed.get_samples(5), source.get_samples(5)
        assert served == expected
        assert [g[0].group_index for g in served] == [1, 3, 4, 5, 6]
        assert served[0][0].reward is None

    def test_save_and_load(self, args: SimpleNamespace, tmp_path: Path) -> None:
        source = RolloutDataSourceWithBuffer(args)
        source.save(0)
        source.load(0)
        assert source.state_dict()["next_group_index"] == 0
        args.data_source_state_dir = str(tmp_path / "state")
        with pytest.raises(InputError, match=r"state\.json does not exist"):
            source.load()
        source.get_samples(5)
        source.save(0)
        assert [p.name for p in (tmp_path / "state").iterdir()] == ["state.json"]
        resumed = RolloutDataSourceWithBuffer(args)
        resumed.load()
        assert resumed.state_dict()["next_group_index"] == 5
        assert resumed.get_samples(3) == source.get_samples(3)
        (tmp_path / "state" / "state.json").write_text("{")
        with pytest.raises(InputError, match="is not JSON"):
            resumed.load(1)

    @pytest.mark.parametrize(
        "change",
        [{"position": COUNT}, {"position": -1}, {"epoch": -1}, {"buffer": [[{"x": 1}]]}, {"next_group_index": None}],
    )
    def test_a_state_that_does_not_fit_is_refused(self, args: SimpleNamespace, change: dict[str, Any]) -> None:
        source = RolloutDataSourceWithBuffer(args)
        source.get_samples(2)
        before = source.state_dict()
        with pytest.raises(InputError):
            source.load_state_dict(before | change)
        assert source.state_dict() == before


class TestBuffer:
    def test_the_buffer_is_served_first_then_fresh_prompts(self, args: SimpleNamespace) -> None:
        source = RolloutDataSourceWithBuffer(args)
        first = source.get_samples(3)
        source.add_samples([first[2], first[0]])
        assert [g[0].group_index for g in source.get_samples(1)] == [2]
        assert [g[0].group_index for g in source.get_samples(3)] == [0, 3, 4]
        assert source.buffer == []

    def test_the_filter_is_called_with_the_pages_arguments(self, args: SimpleNamespace) -> None:
        calls = []

        def last(
            called_args: Any, rollout_id: int | None, buffer: list[list[Sample]], num_samples: int
        ) -> list[list[Sample]]:
            calls.append((called_args, rollout_id, len(buffer), num_samples))
            return [buffer.pop()]

        source = RolloutDataSourceWithBuffer(args)
        source.buffer_filter = last
        source.add_samples(source.get_samples(3))
        assert calls == []
        assert [g[0].group_index for g in source.get_samples(2)] == [2, 3]
        assert calls == [(args, None, 3, 2)]

    def test_pop_first_takes_from_the_head(self) -> None:
        buffer = [[Sample(group_index=i, index=i, prompt="", seed=0)] for i in range(3)]
        assert [g[0].index for g in pop_first(None, 4, buffer, 2)] == [0, 1]
        assert [g[0].index for g in buffer] == [2]
        assert [g[0].index for g in pop_first(None, 4, buffer, 2)] == [2]
        assert buffer == []

    def test_a_filter_that_returns_too_many_is_refused(self, args: SimpleNamespace) -> None:
        source = RolloutDataSourceWithBuffer(args)
        source.buffer_filter = lambda args, rollout_id, buffer, num_samples: buffer
        source.add_samples(source.get_samples(3))
        with pytest.raises(InputError, match="returned 3 groups and 2 were asked for"):
            source.get_samples(2)

    @pytest.mark.parametrize("answer", [None, (), [[Sample(group_index=0, index=0, prompt="", seed=0)]]])
    def test_a_filter_that_returns_what_is_not_in_the_buffer_is_refused(
        self, args: SimpleNamespace, answer: Any
    ) -> None:
        source = RolloutDataSourceWithBuffer(args)
        source.buffer_filter = lambda args, rollout_id, buffer, num_samples: answer
        source.add_samples(source.get_samples(3))
        with pytest.raises(InputError, match="something else than a list of groups of the buffer"):
            source.get_samples(2)

    def test_what_a_filter_serves_leaves_the_buffer(self, args: SimpleNamespace) -> None:
        """Also where the filter leaves it there: no group is trained on for ever."""
        source = RolloutDataSourceWithBuffer(args)
        source.buffer_filter = lambda args, rollout_id, buffer, num_samples: buffer[1:2]
        source.add_samples(source.get_samples(3))
        assert [g[0].group_index for g in source.get_samples(2)] == [1, 3]
        assert [g[0].group_index for g in source.buffer] == [0, 2]

    def test_groups_that_are_not_whole_or_there_already_are_refused(self, args: SimpleNamespace) -> None:
        source = RolloutDataSourceWithBuffer(args)
        groups = source.get_samples(2)
        with pytest.raises(InputError, match="pass whole groups"):
            source.add_samples([groups[0][:2]])
        with pytest.raises(InputError, match=r"of groups \[0, 1\]"):
            source.add_samples([[*groups[0][:2], groups[1][0]]])
        source.add_samples([groups[0]])
        with pytest.raises(InputError, match="group 0 is in the buffer already"):
            source.add_samples([groups[0]])
        assert len(source.buffer) == 1


class TestTable:
    def test_round_trip_through_a_part(self, args: SimpleNamespace, tmp_path: Path) -> None:
        groups = RolloutDataSourceWithBuffer(args).get_samples(COUNT + 2)
        assert {s.rm_type for g in groups for s in g} == {None, "jpeg_incompressibility"}
        table = samples_to_table(reversed(groups))
        assert table.schema.equals(PROMPTS, check_metadata=True)
        assert table.column("sample_index").to_pylist() == list(range((COUNT + 2) * N))
        files = Files(str(tmp_path / "root"))
        stored = read_table(files, write_table(files, "prompts.parquet", table))
        assert all(len(d) == 64 for d in stored.column("row_digest").to_pylist())
        assert table_to_samples(stored) == groups

    def test_rows_in_any_order_give_groups_in_group_order(self, args: SimpleNamespace) -> None:
        groups = RolloutDataSourceWithBuffer(args).get_samples(4)
        table = samples_to_table(groups)
        shuffled = table.take(pa.array([7, 0, 11, 3, 1, 9, 2, 10, 5, 4, 8, 6]))
        assert table_to_samples(shuffled) == groups

    def test_samples_of_a_source_of_ones_own(self) -> None:
        own = [[Sample(group_index=4, index=8, prompt="é", seed=1), Sample(group_index=4, index=9, prompt="é", seed=2)]]
        back = table_to_samples(samples_to_table(own))
        assert [(s.index, s.prompt, s.seed) for s in back[0]] == [(8, "é", 1), (9, "é", 2)]
        assert drawn(back) == [(-1, -1)]

    def test_what_the_table_cannot_hold_is_refused(self) -> None:
        twice = [
            [Sample(group_index=0, index=1, prompt="a", seed=1)],
            [Sample(group_index=1, index=1, prompt="b", seed=2)],
        ]
        with pytest.raises(InputError, match="two samples have the index 1"):
            samples_to_table(twice)
        with pytest.raises(InputError, match="metadata of sample 3 is not JSON"):
            samples_to_table([[Sample(group_index=0, index=3, prompt="a", seed=1, metadata={"x": {1, 2}})]])
        with pytest.raises(InputError, match="sample 3 brings a negative prompt"):
            samples_to_table([[Sample(group_index=0, index=3, prompt="a", seed=1, negative_prompt="b")]])
