"""A user's own functions, found by dotted path in the code path: checked at the start, digested with what they import.

`importlib` keeps what it has imported: a process that imported another content of a module says so instead of running it.
"""

import ast
import contextlib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from miles_core.config import flag
from miles_core.errors import InputError, StageError
from miles_core.hooks import HOOKS, Hook

_BY_FLAG = {hook.flag: hook for hook in HOOKS}
_IMPORTED: dict[str, str] = {}
# Names that the reference's page imports, where no real `miles` is installed.
_NAMES = {
    "miles.utils.types": {"Sample": "miles_core.data.sample.Sample"},
    "miles.rollout.data_source": {
        "RolloutDataSourceWithBuffer": "miles_core.data.data_source.RolloutDataSourceWithBuffer",
        "pop_first": "miles_core.data.data_source.pop_first",
    },
    "miles.rollout.filter_hub.dynamic_sampling_filters": {
        "check_reward_nonzero_std": "miles_core.algorithms.filters.check_reward_nonzero_std",
    },
    "miles.rollout.filter_hub.base_types": {"DynamicFilterOutput": "miles_core.algorithms.filters.DynamicFilterOutput"},
    "miles.rollout.sglang_diffusion_rollout": {
        "generate_microgroup": "miles_core.rollout.rollout_function.generate_microgroup",
        "generate_rollout": "miles_core.rollout.rollout_function.generate_rollout",
    },
    "miles.rollout.base_types": {
        "RolloutFnTrainOutput": "miles_core.rollout.rollout_function.RolloutFnTrainOutput",
        "RolloutFnEvalOutput": "miles_core.rollout.rollout_function.RolloutFnEvalOutput",
        "call_rollout_fn": "miles_core.rollout.rollout_function.call_rollout_fn",
    },
    "miles.rollout.step_strategy_hub": {
        "sde_window": "miles_core.rollout.step_strategies.sde_window",
        "epoch_global_random_choice": "miles_core.rollout.step_strategies.epoch_global_random_choice",
    },
    "miles.ray.data_conversion_hub.flow_grpo": {
        "expand_samples_to_train_pairs": "miles_core.algorithms.train_pairs.expand_samples_to_train_pairs",
    },
    "miles.backends.fsdp_utils.loss_hub.flow_grpo": {
        "prepare_flow_grpo_batch": "miles_core.algorithms.flow_grpo.prepare_flow_grpo_batch",
        "flow_grpo_loss_formula": "miles_core.algorithms.flow_grpo.flow_grpo_loss_formula",
    },
    "miles.backends.fsdp_utils.loss_hub.types": {"PreparedBatch": "miles_core.algorithms.flow_grpo.PreparedBatch"},
    "miles.rollout.rm_hub": {"batched_async_rm": "miles_core.rewards.rm_hub.batched_async_rm"},
    "miles.utils.misc": {"load_function": "miles_core.user_code.load_function"},
    "miles.rollout.rm_hub.pickscore": {"_sample_to_rgb_hwc_uint8_frames": "miles_core.rewards.scores.rgb_frames"},
}


def load_hook(option: str, path: str, code_path: str) -> Callable[..., Any]:
    """The function that stands in the hook `option` (a field's name). Raises InputError for one that cannot be imported, or
    that does not take what it will be given."""
    hook, flag = _BY_FLAG[option], "--" + option.replace("_", "-")
    module, _, name = path.rpartition(".")
    where = f"{flag} {path}"
    if not module or not all(part.isidentifier() for part in path.split(".")):
        raise InputError(f"{where}: give a dotted path of a function, such as my_project.rewards.score")
    _prepare(code_path)
    digest = hook_digest(option, path, code_path)
    if _IMPORTED.setdefault(path, digest) != digest:
        raise InputError(f"{where} has changed since this process imported it: give the command again")
    try:
        found = getattr(importlib.import_module(module), name)
    except AttributeError:
        raise InputError(f"{where}: the module {module} has no {name}") from None
    except Exception as fault:
        raise InputError(
            f"{where} cannot be imported from {code_path} (--code-path): {type(fault).__name__}: {fault}"
        ) from fault
    if not callable(found):
        raise InputError(f"{where} is no function")
    _check_signature(found, hook, where)
    return found


def load_function(path: str) -> Any:
    """What a dotted path names, as the reference's miles.utils.misc.load_function gives it. Raises ImportError or
    AttributeError."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def load_own(option: str, args: Any) -> Callable[..., Any] | None:
    """The user's function in the place of the hook `option` as it is, None where `args` names none there."""
    path = getattr(args, option)
    return None if path is None else load_hook(option, path, args.code_path)


def own_function(option: str, args: Any, during: str = "") -> Callable[..., Any] | None:
    """The user's function in the place of the hook `option`, None where `args` names none there; args.code_path is where it is
    found. What it raises becomes a StageError that names it."""
    path = getattr(args, option)
    if path is None:
        return None
    function = load_hook(option, path, args.code_path)

    @functools.wraps(function)
    def named(*arguments: Any, **options: Any) -> Any:
        with naming(option, path, during):
            return function(*arguments, **options)

    @functools.wraps(function)
    async def awaited(*arguments: Any, **options: Any) -> Any:
        with naming(option, path, during):
            return await function(*arguments, **options)

    return awaited if inspect.iscoroutinefunction(function) else named


@contextlib.contextmanager
def naming(option: str, path: str, during: str = "") -> Iterator[None]:
    """What the user's code raises becomes a StageError that names it."""
    try:
        yield
    except StageError:
        raise
    except Exception as fault:
        raise StageError(
            f"{flag(option)} {path} failed{during}: {type(fault).__name__}: {fault}; mend it and run the same command again"
        ) from fault


def hook_digest(option: str, path: str, code_path: str) -> str:
    """SHA-256 over the hook's module and all that it imports from the code path, by name and content.

    A changed constant or helper changes it. Raises InputError where the module is not there.
    """
    module = path.rpartition(".")[0]
    found: dict[str, bytes] = {}
    _collect(module, Path(code_path), found)
    if not found:
        if _installed(module):
            return hashlib.sha256(f"{path}\n{_version_of(module)}".encode()).hexdigest()
        flag = "--" + option.replace("_", "-")
        raise InputError(f"{flag} {path}: there is no module {module} in {code_path} (--code-path), nor installed")
    digest = hashlib.sha256(path.encode())
    for name in sorted(found):
        digest.update(f"\n{name}\n".encode() + hashlib.sha256(found[name]).digest())
    return digest.hexdigest()


def _check_signature(function: Callable[..., Any], hook: Hook, where: str) -> None:
    is_class = bool(hook.methods) or (bool(hook.keywords) and not hook.parameters)
    kind = "class" if is_class else f"{'async ' if hook.asynchronous else ''}def"
    shown = (*hook.keywords, *(f"{name}=False" for name in hook.optional))
    words = [*hook.parameters, *(["*", *shown] if shown else [])]
    expected = f"{kind} {hook.default.rsplit('.', 1)[1]}({', '.join(words)})"
    if hook.methods:
        expected += " with " + ", ".join(f"{name}({', '.join(['self', *taken])})" for name, taken in hook.methods)
    if hook.methods and not inspect.isclass(function):
        raise InputError(f"{where} is no class: write it as {expected}")
    try:
        signature = inspect.signature(function)
        named = (*hook.keywords, *(name for name in hook.optional if name in signature.parameters))
        signature.bind(*hook.parameters, **dict.fromkeys(named))
        for name, taken in hook.methods:
            inspect.signature(getattr(function, name)).bind(None, *taken)
    except AttributeError as fault:
        raise InputError(f"{where} lacks {fault.name}: write it as {expected}") from None
    except (TypeError, ValueError):
        raise InputError(f"{where} does not take what it is given: write it as {expected}") from None
    if hook.asynchronous and not inspect.iscoroutinefunction(function):
        raise InputError(f"{where} is not asynchronous: write it as {expected}")


def _collect(module: str, root: Path, found: dict[str, bytes]) -> None:
    """The sources under `root` of a module, its packages, and what they import, into `found` by module name."""
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        source = _source(name, root)
        if source is None or name in found:
            continue
        found[name] = source.read_bytes()
        for imported in _imports(found[name], name, source.name == "__init__.py"):
            _collect(imported, root, found)


def _source(module: str, root: Path) -> Path | None:
    stem = root.joinpath(*module.split("."))
    return next((path for path in (stem / "__init__.py", stem.with_name(f"{stem.name}.py")) if path.is_file()), None)


def _imports(source: bytes, module: str, is_package: bool) -> set[str]:
    """Names that a module's source may import: modules, and what could be submodules of them."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return set()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".") if is_package else module.split(".")[:-1]
            base = base[: len(base) - node.level + 1] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            names |= {start, *(f"{start}.{alias.name}".lstrip(".") for alias in node.names)}
    return {name for name in names if name}


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _version_of(module: str) -> str:
    """What an installed module is known by: its source where it has one."""
    spec = importlib.util.find_spec(module)
    origin = Path(spec.origin) if spec and spec.origin else None
    return hashlib.sha256(origin.read_bytes()).hexdigest() if origin and origin.is_file() else "built in"


def _prepare(code_path: str) -> None:
    """The code path comes first, and the reference's names lead to ours where it is not installed."""
    if code_path not in sys.path:
        sys.path.insert(0, code_path)
    if "miles" not in sys.modules and importlib.util.find_spec("miles") is not None:
        return
    for module, names in _NAMES.items():
        parts = module.split(".")
        for depth in range(1, len(parts) + 1):
            name = ".".join(parts[:depth])
            if name not in sys.modules:
                sys.modules[name] = types.ModuleType(name)
                sys.modules[name].__path__ = []
        vars(sys.modules[module]).setdefault("__getattr__", functools.partial(_ours, module, names))


def _ours(module: str, names: dict[str, str], attribute: str) -> Any:
    """What stands here for a name of the reference, imported when it is asked for."""
    if attribute not in names:
        raise AttributeError(f"{module} has no {attribute} here: it has {', '.join(names)}")
    return load_function(names[attribute])
