"""The options as a form: every group's fields, each optional. The parameter of flows, and what the UI shows of it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Union, cast, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, model_serializer
from pydantic.fields import FieldInfo
from pydantic.json_schema import SkipJsonSchema

from miles_core.config.base import Group
from miles_core.config.overrides import check_known, from_mapping
from miles_core.config.run_config import FIELDS, GROUPS
from miles_core.errors import InputError


class _Form(BaseModel):
    """Fields that may be left out; only those that were given are written."""

    model_config = ConfigDict(extra="forbid")

    @model_serializer(mode="wrap")
    def _given(self, write: Any) -> dict[str, Any]:
        return {name: value for name, value in write(self).items() if value is not None and value != {}}


def _optional(name: str, info: FieldInfo) -> Any:
    """A field's type and its entry of the form. None stands for `not given`: the form shows the type alone."""
    kinds = [kind for kind in get_args(info.annotation) if kind is not type(None)]
    is_union = type(None) in get_args(info.annotation)
    kind = Union[tuple(kinds)] if is_union else info.annotation  # noqa: UP007
    if info.metadata:
        kind = Annotated[kind, *info.metadata]
    entry = Field(default=None, title=name, description=info.description, json_schema_extra=_no_default)
    not_given = cast(Any, SkipJsonSchema)[None]
    return kind | not_given, entry


def _no_default(schema: dict[str, Any]) -> None:
    schema.pop("default", None)


def _form(name: str, group: type[Group]) -> type[BaseModel]:
    fields: dict[str, Any] = {field: _optional(field, info) for field, info in group.model_fields.items()}
    return create_model(f"{name.capitalize()}Options", __base__=_Form, __doc__=group.__doc__, **fields)


if TYPE_CHECKING:

    class Options(BaseModel):
        """Options of a run by concern."""
else:
    Options = create_model(
        "Options",
        __base__=_Form,
        __doc__="Options of a run by concern. Those left out are as the recipe or the run has them.",
        **{
            name: (
                _form(name, group),
                Field(default_factory=dict, validate_default=True, title=name, description=group.__doc__),
            )
            for name, group in GROUPS.items()
        },
    )


NONE = Options()


def grouped(changes: Mapping[str, Any]) -> Options:
    """The form of flat changes by field name. Raises InputError for what is no option or no value of one."""
    nested: dict[str, dict[str, Any]] = {}
    for name, value in from_mapping(changes).items():
        nested.setdefault(FIELDS[name][0], {})[name] = value
    return checked(nested)


def checked(given: Options | Mapping[str, Any] | None) -> Options:
    """The form of what a flow was given. Raises InputError in one sentence that names the place."""
    if given is None or isinstance(given, BaseModel):
        return given or Options()
    try:
        return Options.model_validate(given)
    except ValidationError as fault:
        raise InputError(_sentence(fault)) from None


def changes_of(given: Options | Mapping[str, Any] | None) -> dict[str, Any]:
    """The fields that were given, flat, by name. Raises InputError as `checked`."""
    written = checked(given).model_dump()
    return {name: value for group in written.values() for name, value in group.items()}


def _sentence(fault: ValidationError) -> str:
    first = fault.errors()[0]
    place, message = [str(part) for part in first["loc"][:2]], first["msg"].removeprefix("Value error, ")
    where, name = ".".join(["options", *place]), place[-1] if place else ""
    if first["type"] == "extra_forbidden" and name in FIELDS:
        return f"{where}: {name} belongs to the group {FIELDS[name][0]}, give options.{FIELDS[name][0]}.{name}"
    if first["type"] == "extra_forbidden" and len(place) == 1:
        return f"{where}: there is no such group, choose from {', '.join(GROUPS)}"
    if first["type"] == "extra_forbidden":
        check_known(name, where)
    if first["type"].startswith("model_"):
        return f"{where} {first['input']!r}: give its options by name"
    return f"{where} {first['input']!r}: {message[0].lower()}{message[1:]}"
