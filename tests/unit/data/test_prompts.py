"""Prompt files: what is read, and the one sentence that each fault gets."""

import json
from pathlib import Path

import pytest

from miles_core.data.prompts import PROMPT_SETS, Prompt, load_prompts, named_set, named_sets, resolve_prompt_path
from miles_core.errors import InputError
from miles_core.rewards.quoted import normalized, quoted_target


def write(folder: Path, name: str, data: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def load(path: Path, rm_type: str | None = "jpeg_compressibility", **keys: str) -> list[Prompt]:
    return load_prompts(path, **({"input_key": "input", "metadata_key": "metadata"} | keys), rm_type=rm_type)


class TestWhatIsRead:
    def test_text_is_one_prompt_a_line_and_blank_lines_do_not_count(self, tmp_path: Path) -> None:
        path = write(tmp_path, "p.txt", "a cat\n\n  a dog \n   \na café")
        assert load(path) == [Prompt(0, "a cat"), Prompt(1, "a dog"), Prompt(2, "a café")]

    def test_jsonl_with_metadata_blank_lines_and_unicode_line_separator(self, tmp_path: Path) -> None:
        rows = [
            '{"input": "a \u2028 b"}',
            "",
            '{"input": "c", "metadata": {"rm_type": "jpeg_incompressibility", "k": [1]}}',
        ]
        prompts = load(write(tmp_path, "p.jsonl", "\n".join(rows)))
        assert prompts == [
            Prompt(0, "a \u2028 b"),
            Prompt(1, "c", {"rm_type": "jpeg_incompressibility", "k": [1]}),
        ]

    @pytest.mark.parametrize("name", ["p.txt", "p.jsonl"])
    def test_byte_order_mark_and_crlf_change_nothing(self, tmp_path: Path, name: str) -> None:
        lines = ["a cat", "a dog"] if name == "p.txt" else ['{"input": "a cat"}', '{"input": "a dog"}']
        plain = load(write(tmp_path, name, "\n".join(lines)))
        windows = load(write(tmp_path, name, b"\xef\xbb\xbf" + "\r\n".join([*lines, ""]).encode()))
        assert windows == plain == [Prompt(0, "a cat"), Prompt(1, "a dog")]

    def test_keys_have_the_names_that_are_asked_for(self, tmp_path: Path) -> None:
        path = write(tmp_path, "p.jsonl", '{"caption": "a cat", "about": {"rm_type": "jpeg_incompressibility"}}')
        assert load(path, None, input_key="caption", metadata_key="about") == [
            Prompt(0, "a cat", {"rm_type": "jpeg_incompressibility"})
        ]

    def test_null_metadata_and_null_rm_type_are_as_none(self, tmp_path: Path) -> None:
        path = write(
            tmp_path, "p.jsonl", '{"input": "a", "metadata": null}\n{"input": "b", "metadata": {"rm_type": null}}'
        )
        assert [p.metadata for p in load(path)] == [{}, {"rm_type": None}]
        with pytest.raises(InputError, match="line 1 names no rm_type"):
            load(path, None)

    def test_the_packaged_sets(self) -> None:
        tiny = load_prompts(resolve_prompt_path("tiny"), rm_type="jpeg_compressibility")
        words = load_prompts(resolve_prompt_path("tiny-ocr"), rm_type=None)
        assert (len(tiny), len(words)) == (48, 32)
        assert len({p.text for p in tiny}) == 48
        targets = [quoted_target(p.text) for p in words]
        assert len(set(targets)) == 32
        assert all(t and t.isascii() and t.isupper() and t.isalpha() and 3 <= len(t) <= 6 for t in targets)
        assert all(p.metadata == {"rm_type": "ocr"} for p in words)
        held_out = load_prompts(resolve_prompt_path("tiny-ocr-eval"), rm_type=None)
        others = {quoted_target(p.text) for p in held_out}
        assert len(others) == len(held_out) == 32 and not others & set(targets)

    def test_any_other_name_is_a_path(self, tmp_path: Path) -> None:
        assert resolve_prompt_path(str(tmp_path / "tiny")) == tmp_path / "tiny"
        assert set(PROMPT_SETS) == {"tiny", "tiny-ocr", "tiny-ocr-eval"}
        with pytest.raises(InputError, match="--prompt-data"):
            resolve_prompt_path("")


GOOD = '{"input": "a cat"}\n'

FAULTS = [
    ("not JSON", "p.jsonl", GOOD + '{"input": "a', "line 2 is not JSON"),
    ("NaN is no JSON", "p.jsonl", '{"input": "a", "metadata": {"x": NaN}}', "line 1 is not JSON"),
    ("too deep", "p.jsonl", "[" * 100_000, "line 1 is not JSON"),
    ("a list", "p.jsonl", GOOD + "\n[1]", "line 3 is not a JSON object"),
    ("a string", "p.jsonl", '"a cat"', "line 1 is not a JSON object"),
    ("no key", "p.jsonl", '{"text": "a", "id": 1}', r"line 1 has no key 'input' \(keys there: text, id\)"),
    ("no keys at all", "p.jsonl", "{}", r"line 1 has no key 'input' \(keys there: none\)"),
    ("a number", "p.jsonl", '{"input": 5}', "line 1: 'input' is not a string"),
    ("null", "p.jsonl", '{"input": null}', "line 1: 'input' is not a string"),
    ("empty", "p.jsonl", GOOD + '{"input": ""}', "line 2: 'input' is empty"),
    ("blank", "p.jsonl", GOOD + '{"input": " \\t\\n"}', "line 2: 'input' is empty"),
    ("metadata list", "p.jsonl", '{"input": "a", "metadata": []}', "line 1: 'metadata' is not a JSON object"),
    ("metadata text", "p.jsonl", '{"input": "a", "metadata": "ocr"}', "line 1: 'metadata' is not a JSON object"),
    ("half a pair", "p.jsonl", '{"input": "a \\ud800"}', "line 1 holds half of a surrogate pair"),
    (
        "half a pair below",
        "p.jsonl",
        '{"input": "a", "metadata": {"x": "\\udfff"}}',
        "line 1 holds half of a surrogate pair",
    ),
    (
        "unknown scorer",
        "p.jsonl",
        '{"input": "a", "metadata": {"rm_type": "ORC"}}',
        "line 1: unknown rm_type 'ORC': choose pickscore",
    ),
    ("scorer list", "p.jsonl", '{"input": "a", "metadata": {"rm_type": ["ocr"]}}', "line 1: unknown rm_type"),
    ("latin-1", "p.txt", b"a cat\na caf\xe9\n", "line 2 is not UTF-8: byte 6 of the line is 0xe9"),
    ("utf-16", "p.txt", "a cat".encode("utf-16"), "line 1 is not UTF-8: byte 1 of the line is 0xff"),
    ("empty file", "p.txt", "", "holds no prompt"),
    ("blank file", "p.jsonl", " \n\r\n\n", "holds no prompt"),
]


class TestFaults:
    @pytest.mark.parametrize(("name", "data", "says"), [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS])
    def test_one_sentence_names_file_and_line(self, tmp_path: Path, name: str, data: str | bytes, says: str) -> None:
        path = write(tmp_path, name, data)
        with pytest.raises(InputError, match=says) as fault:
            load(path)
        assert str(path) in str(fault.value)
        assert "\n" not in str(fault.value)

    def test_missing_and_folder(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="nowhere.txt does not exist"):
            load(tmp_path / "nowhere.txt")
        with pytest.raises(InputError, match="is a folder"):
            load(tmp_path)

    def test_neither_the_line_nor_the_run_names_a_scorer(self, tmp_path: Path) -> None:
        path = write(
            tmp_path, "p.jsonl", '{"input": "a", "metadata": {"rm_type": "jpeg_compressibility"}}\n{"input": "b"}'
        )
        assert len(load(path)) == 2
        with pytest.raises(
            InputError, match="line 2 names no rm_type in its metadata and the run has none: give --rm-type"
        ):
            load(path, None)

    def test_the_runs_own_scorer_is_checked(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="--rm-type: unknown rm_type 'sharpness'"):
            load(write(tmp_path, "p.txt", "a"), "sharpness")


class TestPitfall23:
    """flow_grpo #243: a prompt without a target under the OCR reward is told when the file is read."""

    NO_TARGET = ("a sign", 'a sign "MILES', "a sign “MILES”", "a sign 'MILES'")
    EMPTY_TARGET = ('a sign ""', 'a sign "   "', 'a sign "\t"')

    @pytest.mark.parametrize("text", [*NO_TARGET, *EMPTY_TARGET])
    def test_pitfall_23_prompt_without_target_is_refused_with_its_line(self, tmp_path: Path, text: str) -> None:
        rows = [{"input": 'a sign "MILES"'}, {"input": text}]
        path = write(tmp_path, "p.jsonl", "\n".join(json.dumps(row) for row in rows))
        assert len(load(path, "jpeg_compressibility")) == 2
        wanted = "has no text between two" if text in self.NO_TARGET else "has nothing between its first two"
        with pytest.raises(InputError, match=f"line 2 {wanted}"):
            load(path, "ocr")

    def test_pitfall_23_the_lines_own_scorer_counts_not_the_runs(self, tmp_path: Path) -> None:
        rows = [
            {"input": "a", "metadata": {"rm_type": "jpeg_compressibility"}},
            {"input": "b", "metadata": {"rm_type": "ocr"}},
        ]
        path = write(tmp_path, "p.jsonl", "\n".join(json.dumps(row) for row in rows))
        with pytest.raises(InputError, match="line 2 has no text"):
            load(path, "ocr")
        assert len(load(write(tmp_path, "q.jsonl", json.dumps(rows[0])), "ocr")) == 1

    def test_pitfall_23_text_files_too(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="line 3 has no text"):
            load(write(tmp_path, "p.txt", 'a "B"\n\na b\n'), "ocr")


class TestQuotedTarget:
    @pytest.mark.parametrize(
        ("prompt", "target"),
        [
            ('a sign "MILES"', "MILES"),
            ('"A" and "B"', "A"),
            ('a "B C" "D', "B C"),
            ('a ""', ""),
            ("a 'B'", None),
            ('a "B', None),
            ("a", None),
        ],
    )
    def test_between_the_first_two_quotes(self, prompt: str, target: str | None) -> None:
        assert quoted_target(prompt) == target

    def test_normalized(self) -> None:
        assert normalized(" Step Goal  ACHIEVED ") == "stepgoalachieved"


class TestEvaluationSet:
    @pytest.mark.parametrize(
        ("given", "found"),
        [
            ("drawn evals.jsonl", ("drawn", "evals.jsonl")),
            ("drawn-2  /data/my evals.txt", ("drawn-2", "/data/my evals.txt")),
            ("evals.jsonl", ("default", "evals.jsonl")),
            ("tiny", ("default", "tiny")),
            ("drawn tiny", ("drawn", "tiny")),
        ],
    )
    def test_a_name_and_a_file_or_a_file_alone(self, given: str, found: tuple[str, str]) -> None:
        assert named_set(given) == found

    def test_several_sets_stand_a_line_each_and_no_name_twice(self) -> None:
        assert named_sets("a x.txt\n\nb my y.txt\n") == [("a", "x.txt"), ("b", "my y.txt")]
        with pytest.raises(InputError, match="the set 'a' twice"):
            named_sets("a x.txt\na y.txt")

    def test_a_file_with_a_space_in_its_name_is_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "my evals.txt").write_text("a\n")
        assert named_set(f"{tmp_path}/my evals.txt") == ("default", f"{tmp_path}/my evals.txt")

    @pytest.mark.parametrize("given", ["/data/my evals.txt", "../x y", ". y", "ä y", "a" * 65 + " y"])
    def test_what_is_no_name_is_refused(self, given: str) -> None:
        with pytest.raises(InputError, match="--eval-prompt-data .*NAME PATH"):
            named_set(given)

    def test_a_missing_file_names_the_option_that_named_it(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="give --eval-prompt-data a"):
            load_prompts(tmp_path / "none.txt", rm_type="jpeg_compressibility", option="--eval-prompt-data")
