"""Writes docs/configuration.md, artifacts.md and glossary.md from the classes; a test holds them to it."""

import ast
from pathlib import Path

import pyarrow as pa

from miles_core.config import FIELDS, GROUPS, affects, flag, meaning
from miles_core.config.reference import NOT_YET
from miles_core.store import schemas
from miles_core.store.stages import STAGES

HERE = Path(__file__).parent
PAGES = HERE.parent


def configuration() -> str:
    """Every option by concern, with default, what it affects, and its sentence."""
    out = [
        "# Configuration",
        "",
        "Generated from `miles_core/config` by `python docs/source/generate.py`.",
        "",
        "An option is given on the command line (`--lr 1e-3`, `--use-lora`, `--no-use-lora`), as the environment variable",
        '`MILES_SCRIPT_LR`, as a flow parameter of its group, as they stand below (`options: {"optimizer": {"lr": 0.001}}`),',
        "or by the recipe, in this order of precedence.",
        "*Affects* names the stages that are made again when the option changes; an *operational* option changes no result.",
    ]
    for group, kind in GROUPS.items():
        out += ["", f"## {group}", "", " ".join((kind.__doc__ or "").split()), ""]
        out += ["| option | default | affects | meaning |", "|---|---|---|---|"]
        for name, (owner, info) in FIELDS.items():
            if owner == group:
                default = "unset" if info.default is None else f"`{info.default}`" if info.default != "" else "required"
                stages = ", ".join(affects(name)) or "operational"
                out.append(f"| `{flag(name)}` | {default} | {stages} | {meaning(name).replace('|', '/')} |")
    out += ["", "## Not there yet", "", "Options of the reference that are refused by name:", ""]
    out += [", ".join(f"`{flag(name)}`" for name in sorted(NOT_YET)) + ", and any `--sglang-…`."]
    return "\n".join(out) + "\n"


def artifacts() -> str:
    """Every column of every stage."""
    latents = schemas.latents_schema(latent_shape=(16, 64, 64), positions=3, latent_dtype=pa.float32())
    tables = {
        "policy": schemas.POLICY,
        "prompts": schemas.PROMPTS,
        "groups (beside prompts that were drawn in waves)": schemas.GROUPS,
        "rollout": schemas.rollout_schema(sde_steps=2, steps=10),
        "latents (of rollout, apart)": latents,
        "conditioning (beside rollout)": schemas.CONDITIONING,
        "rewards": schemas.rewards_schema(["ocr"]),
        "advantages": schemas.ADVANTAGES,
        "train data (beside advantages, of an own conversion)": schemas.train_data_schema(["weight"]),
        "update": schemas.UPDATE,
        "sync": schemas.SYNC,
        "evaluation": schemas.evaluation_schema(["ocr"]),
        "metrics.parquet (of a run)": schemas.METRICS,
    }
    out = [(HERE / "artifacts_head.md").read_text().rstrip()]
    for name, schema in tables.items():
        stage = STAGES.get(name.split()[0])  # type: ignore[call-overload]
        out += ["", f"## {name}", ""]
        if stage and " " not in name:
            out += [f"A row is {stage.doc}.", ""]
        out += ["| column | type | shape | unit | volatile | meaning |", "|---|---|---|---|---|---|"]
        for field in schema:
            meta = {k.decode(): v.decode() for k, v in field.metadata.items()}
            volatile = "yes" if meta["volatile"] == "true" else ""
            kind = str(field.type).replace("element: ", "").replace(" not null", "").replace("|", "/")
            row = [
                f"`{field.name}`",
                kind,
                meta.get("shape", ""),
                meta["unit"],
                volatile,
                meta["doc"].replace("|", "\\|"),
            ]
            out.append("| " + " | ".join(row) + " |")
    return "\n".join(out) + "\n"


def glossary() -> str:
    """One name a stage, everywhere; and the words of the field as they are meant here."""
    out = [
        "# Glossary",
        "",
        "Generated from `miles_core/store/stages.py` and `tasks/` by `python docs/source/generate.py`.",
        "",
        "## Stages",
        "",
        "One name, everywhere: the task run in the UI, the folder in the store, the argument of a command, the SQL view.",
        "",
        "| stage | task function | folder | made from | a row is |",
        "|---|---|---|---|---|",
    ]
    functions = task_functions()
    for stage in STAGES.values():
        folder = "policy/init" if stage.name == "policy" else f"iteration=000012/stage={stage.name}"
        upstream = ", ".join(f"previous {n}" if n == stage.name else n for n in stage.upstream) or "–"
        out.append(f"| {stage.name} | `{functions[stage.name]}` | `{folder}` | {upstream} | {stage.doc} |")
    return "\n".join(out) + "\n\n" + (HERE / "glossary_words.md").read_text()


def task_functions() -> dict[str, str]:
    """The function of each task by the task's name, read without importing Prefect."""
    found = {}
    for path in sorted((PAGES.parent / "tasks").glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            for call in node.decorator_list if isinstance(node, ast.FunctionDef) else []:
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "task":
                    names = [
                        k.value.value for k in call.keywords if k.arg == "name" and isinstance(k.value, ast.Constant)
                    ]
                    found[str(names[0])] = node.name
    return found


if __name__ == "__main__":
    (PAGES / "configuration.md").write_text(configuration())
    (PAGES / "artifacts.md").write_text(artifacts())
    (PAGES / "glossary.md").write_text(glossary())
