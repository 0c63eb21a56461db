"""Each check passes on a good recipe and says stop or warn, with a way out, on a made fault."""

import runpy
import shutil
import socket
import threading
from http.server import ThreadingHTTPServer
from importlib import metadata
from pathlib import Path

import pytest

from miles_core.config.run_config import FIELDS, flag
from miles_core.doctor import batches, installs, logs, memory, place, policy, prompts, rewards, services
from miles_core.doctor.check import Finding
from miles_core.doctor.checks import CHECKS
from miles_core.errors import InputError, StageError
from miles_core.pipeline.run import begin_run, plan_run

SHELF = """
from miles.utils.types import Sample


class Shelf:
    def __init__(self, args):
        self.n = args.n_samples_per_prompt

    def get_samples(self, num_samples):
        n = self.n
        return [
            [Sample(group_index=g, index=g * n + i, prompt=f"book {g}", seed=100 * g + i) for i in range(n)]
            for g in range(num_samples)
        ]

    def add_samples(self, samples):
        pass

    def save(self, rollout_id):
        pass

    def load(self, rollout_id=None):
        pass
"""


def told(finding: Finding, status: str, *words: str) -> None:
    assert finding.status == status, finding
    assert [word for word in words if word not in finding.found + finding.way_out] == [], finding
    assert bool(finding.way_out) == (status in ("warn", "stop")), finding
    named = {word.strip(",.;()") for word in finding.way_out.split() if word.startswith("--")}
    assert named <= {flag(name) for name in FIELDS}, finding


@pytest.mark.parametrize("check", [c for c in CHECKS if not c.loads_model], ids=lambda c: c.name)
def test_a_good_recipe_passes(check, subject):
    told(check.look(subject()), "pass")


def test_a_library_that_is_missing(subject):
    def version(name: str) -> str:
        if name == "peft":
            raise metadata.PackageNotFoundError(name)
        return metadata.version(name)

    told(installs.installs(subject(), version), "stop", "peft", "./install")


@pytest.mark.skipif(not installs._asked_for(), reason="the package is not installed, so that nothing is asked for")
def test_a_library_that_is_too_old(subject):
    told(
        installs.installs(subject(), lambda name: "0.0.1" if name == "peft" else metadata.version(name)),
        "warn",
        "0.0.1",
    )


def test_ocr_needs_its_libraries(subject):
    assert "onnxruntime" in installs.installs(subject(rm_type="ocr")).found
    assert "onnxruntime" not in installs.installs(subject()).found


def test_a_ray_cluster_that_does_not_answer(subject, monkeypatch):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{sock.getsockname()[1]}")
        told(services.ray(subject()), "stop", "RAY_ADDRESS")


def test_gpus_that_are_not_there(subject, monkeypatch):
    made = subject(device="cuda")
    made._made["the GPUs"] = [80_000_000_000]
    told(services.gpus(made), "stop", "there are 1", "--device")
    made._made["the GPUs"] = [80_000_000_000] * 2
    told(services.gpus(made), "pass")


def test_noise_from_a_gpu_that_is_not_there(subject):
    made = subject(device="auto", diffusion_generator_device="cuda")
    made._made["the GPUs"] = []
    told(services.gpus(made), "stop", "--diffusion-generator-device")


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"n_samples_per_prompt": 1, "rollout_microgroup_size": 1}, "stop", ("--n-samples-per-prompt",)),
        ({"rollout_num_engines": 5}, "warn", ("4 microgroups", "--rollout-num-engines 4")),
        ({"actor_num_gpus_per_node": 3}, "warn", ("3 trainer ranks",)),
        ({"n_samples_per_prompt": 1, "rollout_microgroup_size": 1, "globalize_reward_mean": True}, "pass", ()),
    ],
)
def test_batches(changes, status, words, subject):
    told(batches.batches(subject(**changes)), status, *words)


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"lr": 1e-6}, "warn", ("6.0e-06", "--lr")),
        ({"lr_decay_style": "linear", "lr_decay_iters": 4}, "warn", ("0 from about step 4", "--lr-decay-iters 6")),
        ({"lr_warmup_iters": 20}, "warn", ("warm-up",)),
        ({"lr_decay_style": "linear", "lr_decay_iters": 10}, "pass", ()),
    ],
)
def test_learning_rates(changes, status, words, subject):
    told(batches.learning_rates(subject(**changes)), status, *words)


def test_a_clip_range_below_rounding(subject):
    told(policy.clip_range(subject(diffusion_forward_dtype="bf16")), "warn", "1.4e-04", "fp32")
    told(policy.clip_range(subject(diffusion_forward_dtype="bf16", diffusion_clip_range=1e-3)), "pass")


@pytest.mark.parametrize(
    ("off", "clip", "dtype", "status"),
    [
        (0.0, 1e-4, "fp32", "pass"),
        (1e-6, 1e-4, "fp32", "pass"),
        (1e-5, 1e-4, "fp32", "warn"),
        (2e-4, 1e-4, "fp32", "stop"),
        (1e-4, 1e-4, "bf16", "pass"),
        (2e-4, 1e-4, "bf16", "warn"),
        (2e-3, 1e-4, "bf16", "stop"),
        (2e-3, 1e-2, "bf16", "warn"),
        (float("nan"), 1e-4, "fp32", "stop"),
    ],
)
def test_how_far_the_ratio_may_be_off(off, clip, dtype, status):
    told(policy.judge_ratio(off, clip, dtype, "here"), status)


def test_prompts_without_a_target(subject, tmp_path):
    (tmp_path / "p.txt").write_text('a "red" cat\na dog\n')
    with pytest.raises(InputError, match=r"p\.txt line 2 has no text between"):
        prompts.prompts(subject(rm_type="ocr"))


def test_prompts_with_a_target(subject):
    told(prompts.prompts(subject(rm_type="ocr")), "pass", "3 with a quoted target, the longest 'green'")


def test_prompts_that_stand_there_twice(subject, tmp_path):
    (tmp_path / "p.txt").write_text("a cat\na dog\na cat\n")
    told(prompts.prompts(subject()), "warn", "3 prompts, 2 different", "'a cat' stands there 2 times")


def test_fewer_prompts_than_an_iteration_draws(subject):
    told(prompts.prompts(subject(rollout_batch_size=4)), "warn", "--rollout-batch-size 3")


def test_a_data_source_of_ones_own_is_what_is_tried(subject, tmp_path):
    (tmp_path / "doctors_shelf.py").write_text(SHELF)
    made = subject(data_source_path="doctors_shelf.Shelf", code_path=str(tmp_path), prompt_data="")
    told(prompts.prompts(made), "pass", "2 prompts of iteration 0 by doctors_shelf.Shelf, the first 'book 0'")
    assert [[sample.seed for sample in group] for group in made.draw(2)] == [[0, 1, 2, 3], [100, 101, 102, 103]]
    assert made.inputs.prompts == ()


def test_a_prompt_that_every_encoder_cuts(subject, tmp_path):
    (tmp_path / "p.txt").write_text("a cat\n" + "x" * 300 + "\n")
    told(prompts.prompt_length(subject()), "warn", "1 prompts are cut by every text encoder")
    (tmp_path / "p.txt").write_text("a cat\n" + "x" * 100 + "\n")
    told(prompts.prompt_length(subject()), "pass", "1 prompts are cut by some encoders")


def test_pitfall_10_lora_targets_that_bind_nothing(subject):
    told(policy.lora(subject(lora_target_modules="to_nowhere")), "stop", "0 modules", "to_nowhere", "attn.to_q")
    told(
        policy.lora(subject(lora_target_modules="attn.to_q,to_nowhere")),
        "warn",
        "2 modules",
        "to_nowhere binds to none",
    )
    told(policy.lora(subject()), "pass", "15 modules take a pair of rank 8, 15,360 parameters")


def test_a_pipeline_without_a_transformer(subject, tiny, tmp_path):
    shutil.copytree(tiny, tmp_path / "m")
    for path in (tmp_path / "m" / "transformer").glob("*.safetensors"):
        path.unlink()
    told(policy.model(subject(hf_checkpoint=str(tmp_path / "m"))), "stop", "no weights of a transformer")


def test_memory_that_does_not_suffice(subject):
    total = memory.host_bytes(subject().config, memory.Needs(0, 0, 0), ocr=False)
    told(memory.memory(subject(), 0.9 * total), "stop", "--rollout-num-engines")
    told(memory.memory(subject(), 1.1 * total), "warn", "tight")
    told(memory.memory(subject(), 2 * total), "pass")
    more = memory.host_bytes(subject(rollout_num_engines=3).config, memory.Needs(0, 7, 0), ocr=False)
    assert more - total == 2 * memory._MODEL_PROCESS + 3 * 7


def test_a_gpu_that_is_too_small(subject):
    made = subject(device="cuda", diffusion_generator_device="cuda")
    made._made["the GPUs"] = [10**9, 10**6]
    told(memory.memory(made, 1e12), "stop", "1.0 MB on the smallest GPU")
    made._made["the GPUs"] = [10**9, 10**9]
    told(memory.memory(made, 1e12), "pass")


def test_the_processes_of_a_run_that_was_measured(subject):
    """`miles train tiny-ocr` with two scorers took 4.04 GB (proportional set size of all its processes)."""
    config = subject(rm_type="ocr", ocr_num_workers=2).config
    assert abs(memory.host_bytes(config, memory.Needs(0, 0, 0), ocr=True) / 4.04e9 - 1) < 0.1


def test_what_weights_and_states_take(subject):
    c = subject().config
    parameters = {"transformer": 1000, "vae": 10, "text_encoder": 100}
    fp32 = memory.needs(c, parameters, 5, memory.SHAPES["sd3"])
    bf16 = memory.needs(c.replace(diffusion_forward_dtype="bf16"), parameters, 5, memory.SHAPES["sd3"])
    assert (fp32.trainer, fp32.engine) == (4 * 1000 + 16 * 5, 4 * 1115)
    assert (bf16.trainer, bf16.engine) == (4 * 1000 + 16 * 5, 2 * 1105 + 4 * 10)
    assert fp32.microgroup == 4 * 2 * (7 * 16 * 8 * 8 + 3 * 64 * 64)


def test_a_containers_limit(tmp_path):
    for name, text in (
        ("memory.max", "2000"),
        ("memory.current", "1500"),
        ("memory.stat", "anon 1\ninactive_file 200"),
    ):
        (tmp_path / name).write_text(text)
    assert memory.host_memory(tmp_path) == 700
    (tmp_path / "memory.max").write_text("max")
    assert memory.host_memory(tmp_path) > 1_000_000
    assert memory.host_memory(tmp_path / "none") > 1_000_000


def test_a_disk_that_is_too_small(subject):
    told(place.disk(subject(), 100_000), "stop", "0 of the 3 iterations left fit", "--artifact-root")
    told(place.disk(subject(), 10**9), "pass")


def test_a_root_that_can_be_written_is_left_as_it_was(subject, root):
    before = root.names()
    told(place.artifact_root(subject(artifact_root=root.files.root)), "pass")
    assert root.names() == before


def test_a_root_that_is_a_file(subject, tmp_path):
    with pytest.raises(InputError, match="is a file"):
        place.artifact_root(subject(artifact_root=str(tmp_path / "p.txt")))


def test_a_run_of_another_meaning(subject, tmp_path):
    there = subject()
    begin_run(plan_run(there.config, "tiny"), "tiny", str(tmp_path))
    told(place.run(subject()), "pass", "carried on: 0 of 3")
    with pytest.raises(InputError, match="another meaning"):
        place.run(subject(lr=0.5))
    told(place.run(subject(lr=0.5, run_id="other")), "pass", "other is new")


def test_scorers_tell_drawn_images_apart(subject):
    for name in ("jpeg_compressibility", "jpeg_incompressibility"):
        told(rewards.self_test(subject(rm_type=name)), "pass", name)


def own_reward(folder, body):
    """Options of an own reward that returns this."""
    (folder / f"own_{len(body)}.py").write_text(f"async def score(args, samples): return {body}")
    return {"custom_rm_path": f"own_{len(body)}.score", "code_path": str(folder), "reward_max_retries": 0}


def test_a_reward_service_is_tried_on_drawn_images(subject):
    brightness = runpy.run_path(str(Path(__file__).parents[3] / "docs/examples/reward_server.py"))["Score"]
    server = ThreadingHTTPServer(("127.0.0.1", 0), brightness)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    asked = {"rm_type": "remote_rm", "rm_url": f"http://127.0.0.1:{server.server_port}/", "reward_max_retries": 0}
    try:
        told(rewards.self_test(subject(**asked)), "pass", "to a drawn word and 1.000 to a blank image")
    finally:
        server.shutdown()
        server.server_close()
    with pytest.raises(StageError, match="ConnectError"):
        rewards.self_test(subject(**asked))


def test_an_own_reward_is_tried_on_drawn_images(subject, tmp_path):
    good = own_reward(tmp_path, "[float(s.generated_output.mean()) for s in samples]")
    told(rewards.self_test(subject(**good)), "pass", "own_", "to a blank image")
    told(rewards.self_test(subject(**own_reward(tmp_path, "[1.0] * len(samples)"))), "warn", "does not tell them apart")
    with pytest.raises(StageError, match="returned 1 values for 2 samples"):
        rewards.self_test(subject(**own_reward(tmp_path, "[1.0]")))


@pytest.mark.parametrize(
    ("mean", "clean", "status"),
    [(0.5, 0.6, "pass"), (0.2, 0.6, "warn"), (0.01, 0.6, "stop"), (0.0, 0.0, "warn"), (0.01, 0.05, "warn")],
)
def test_pitfall_25_noise_that_makes_words_illegible_is_told_before_a_run(mean, clean, status):
    told(rewards.judge_legibility("found", mean, clean, "--diffusion-noise-level 0.3"), status)


class TestLogging:
    @pytest.fixture(autouse=True)
    def bare(self, monkeypatch, tmp_path):
        for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_DIR"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))

    def test_off_and_offline(self, subject):
        told(logs.logs(subject()), "pass", "metrics.parquet", "wandb is off (no WANDB_API_KEY, no --use-wandb)")
        told(
            logs.logs(subject(use_wandb=True, wandb_mode="offline")), "pass", "offline", "root/tiny/wandb", "wandb sync"
        )
        told(logs.logs(subject(use_tensorboard=True)), "pass", "root/tiny/tensorboard")

    def test_without_a_key_and_with_one_from_login(self, subject, tmp_path):
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            server.listen()
            asked = subject(use_wandb=True, wandb_host=f"http://127.0.0.1:{server.getsockname()[1]}")
            told(logs.logs(asked), "warn", "no API key", "--wandb-mode offline")
            (tmp_path / "netrc").write_text("machine 127.0.0.1 login user password k\n")
            (tmp_path / "netrc").chmod(0o600)
            told(logs.logs(asked), "pass", "wandb at http://127.0.0.1:")

    def test_a_server_that_does_not_answer(self, subject, monkeypatch):
        monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
        asked = subject(wandb_host="http://user:s3cret@127.0.0.1:9")
        told(logs.logs(asked), "warn", "nothing answers at http://***@127.0.0.1:9", "--wandb-mode offline")
        told(logs.logs(subject(use_wandb=False)), "pass", "--no-use-wandb")

    def test_packages_that_are_missing(self, subject, monkeypatch):
        monkeypatch.setattr(logs, "installed", lambda package: False)
        told(logs.logs(subject(use_wandb=True)), "stop", "wandb is not installed", "pip install")
        told(logs.logs(subject(use_tensorboard=True)), "stop", "tensorboardX is not installed")
        monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
        told(logs.logs(subject()), "warn", "WANDB_API_KEY is set")
