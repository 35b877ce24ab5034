"""Making things: a form, a page that shows what will be made and asks, and the new thing's page."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flask import Response

from archipel.errors import RefusalError
from archipel.server.dashboard import rendering
from archipel.server.dashboard.desk import Desk
from archipel.server.dashboard.forms import Field, read_form, spell_refusal
from archipel.server.dashboard.pages import ROOT, Page, View, go_to
from archipel.server.http.problems import api_error

Body = Callable[[Desk, dict[str, Any], dict[str, str]], dict[str, Any]]


@dataclass(frozen=True)
class Maker:
    """A form at `path` that asks the API's route `route`. `fields` gets the desk and the path's arguments; `body` makes
    the request of the form's values, and `made` the path of the new thing's page of the route's answer. `of` is the
    route that answers with what it is made of, which the path names. `bundled`: it may be made of a bundle."""

    path: str
    route: str
    title: str
    fields: Callable[[Desk, dict[str, str]], tuple[Field, ...]]
    body: Body
    made: Callable[[Any], str]
    back: Callable[[dict[str, str]], str]
    hint: str = ""
    takes: tuple[str, ...] = ()
    of: str = ""
    bundled: bool = False

    @property
    def pages(self) -> tuple[Page, Page]:
        return (
            Page("GET", self.path, self._named(self._show, "form"), (self.route,)),
            Page("POST", self.path, self._named(self._take, "send"), (self.route,)),
        )

    def _named(self, view: Callable[..., Response | str], what: str) -> View:
        def named(desk: Desk, **arguments: str) -> Response | str:
            return view(desk, arguments)

        named.__name__ = f"{what}_{self.route}"
        return named

    def _show(self, desk: Desk, arguments: dict[str, str]) -> str:
        if self.of:
            # For its 404: there is no form for what does not exist, or is not for this person.
            named: dict[str, Any] = {**arguments}
            desk.ask(self.of, **named)
        return self._form(desk, arguments, {**arguments, **desk.query})

    def _form(self, desk: Desk, arguments: dict[str, str], values: dict[str, str], wrong: str = "") -> str:
        return rendering.render(
            "form.html", desk, title=self.title, fields=self.fields(desk, arguments), values=values, wrong=wrong,
            back=self.back(arguments), hint=self.hint, uploads=self.bundled and desk.may("publish_bundle"),
        )  # fmt: skip

    def _take(self, desk: Desk, arguments: dict[str, str]) -> Response | str:
        form = dict(desk.form)
        if form.get("again"):
            return self._form(desk, arguments, form)
        fields = self.fields(desk, arguments)
        try:
            body = self.body(desk, read_form(fields, form), arguments)
            if not form.get("sure"):
                hints = desk.check(self.route, body)
                return self._review(desk, fields, form, arguments, hints)
            taken: dict[str, Any] = {name: arguments[name] for name in self.takes}
            answer = desk.ask(self.route, body, key=form.get("key"), **taken)
        except RefusalError as error:
            refused = Response(
                self._form(desk, arguments, form, spell_refusal(fields, form, str(error))), mimetype="text/html"
            )
            refused.status_code = api_error(error).status
            return refused
        return go_to(self.made(answer))

    def _review(
        self, desk: Desk, fields: tuple[Field, ...], form: dict[str, str], arguments: dict[str, str], hints: list[str]
    ) -> str:  # fmt: skip
        given = [(field, form.get(field.name, "").strip()) for field in fields]
        return rendering.render(
            "review.html", desk, title=self.title, given=[pair for pair in given if pair[1]],
            key=secrets.token_urlsafe(24), back=self.back(arguments), hints=hints,
        )  # fmt: skip


SMALL = 200
"""A population of fewer devices has too few in a stage of 5 % for a gate to measure anything."""


def _bundle_field(desk: Desk, label: str, required: bool) -> Field:
    """A choice of the bundles that the person may use, newest first."""
    found = desk.ask("list_bundles", query={"limit": 100}).items
    names = {each.digest: f"{each.name}, {rendering.write_size(each.bytes)}" for each in found}
    return Field(
        "bundle", label, "id", required=required, options=tuple(names), names=names,
        expects="expected a bundle of the list, or its whole digest, 64 hexadecimal digits",
        hint="one that the server has, or its digest, which `archipel inspect` shows",
    )  # fmt: skip


def known_populations(desk: Desk) -> tuple[str, ...]:
    """Names of populations that the person may see."""
    return tuple(each.name for each in desk.ask("list_populations", query={"limit": 500}).items)


def _task_fields(desk: Desk, arguments: dict[str, str]) -> tuple[Field, ...]:
    trains, asks = desk.identity.role != "analyst", desk.identity.role != "operator"
    kinds = (("training",) if trains else ()) + (("evaluation", "analytics") if asks else ())
    return (
        Field("name", "Name", required=True, hint="such as digits-2; letters, digits, '.', '-' and '_'"),
        Field("kind", "Kind", "choice", kinds[0], options=kinds, required=True),
        Field("population", "Population", required=True, options=known_populations(desk)),
        _bundle_field(desk, "Bundle", required=True),
        Field("rounds", "Rounds", "whole", "10", required=True),
        Field("cohort", "Devices in a round", "whole", "10", required=True),
        Field("min_cohort", "Fewest devices of a round", "whole", "10", required=True),
        Field(
            "privacy", "Privacy", "choice", "secure", options=("secure", "plain"), required=True,
            hint="secure: the server sees sums alone; plain: it sees each update",
        ),
        Field("mode", "Mode", "choice", "semi-synchronous", required=True,
              options=("semi-synchronous", "synchronous", "asynchronous")),
        Field("metrics", "Metrics of an evaluation", "pairs", hint="names with their bounds: accuracy 1, loss 10"),
        Field("evaluate_every", "Evaluate after every so many rounds", "whole"),
        Field("eligibility", "Eligibility", hint="an expression over attributes of devices; empty: all of them"),
        Field("more", "Further settings", "json", hint='as JSON of the API, such as {"rest_seconds": 3600}'),
    )  # fmt: skip


def _task_body(desk: Desk, values: dict[str, Any], arguments: dict[str, str]) -> dict[str, Any]:
    return {**values.pop("more", {}), **values}


def _model_fields(desk: Desk, arguments: dict[str, str]) -> tuple[Field, ...]:
    known = known_populations(desk)
    return (
        Field("name", "Name", required=True, hint="such as digits; letters, digits, '.', '-' and '_'"),
        Field(
            "population",
            "Population",
            value=known[0] if len(known) == 1 else "",
            required=True,
            options=known,
            hint="the devices that run it: those whose tokens name this population",
        ),
    )


def _version_fields(desk: Desk, arguments: dict[str, str]) -> tuple[Field, ...]:
    population = desk.ask("show_model", name=arguments["name"]).population
    tasks = desk.ask("list_tasks", query={"population": population, "kind": "training", "limit": 50}).items
    names = {each.task_id: f"{each.name}, {each.rounds_committed} rounds, {each.state}" for each in tasks}
    return (
        _bundle_field(desk, "A bundle as it is", required=False),
        Field(
            "task_id", "Or what a training made of its bundle", "id", options=tuple(names), names=names,
            expects="expected a training of the list, or its id, 32 hexadecimal digits",
            hint="one of the population's trainings, or its id",
        ),
        Field("task_version", "After which round of the training", "whole", hint="empty: the newest"),
        Field("parent", "Made from version", "whole", hint="empty: as the lineage says"),
    )  # fmt: skip


def _rollout_fields(desk: Desk, arguments: dict[str, str]) -> tuple[Field, ...]:
    population = desk.ask("show_model", name=arguments["name"]).population
    found = desk.ask("list_populations", query={"limit": 500}).items
    enrolled = next((each.enrolled for each in found if each.name == population), 0)
    stages, least, most = "5 % for 1 h\n25 % for 4 h\n100 % for 1 h", 10, 100
    if enrolled < SMALL:
        # A stage is drawn device by device, so of a few devices it can have fewer than its share.
        first = 75 if enrolled < SMALL // 10 else 50
        stages, least, most = f"{first} % for 1 h\n100 % for 1 h", max(2, enrolled // 8), max(2, enrolled // 4)
    return (
        Field("stages", "Stages", "stages", stages, required=True,
              hint="one in a line: the share of devices, and for how long before the gate decides"),
        Field("metric", "Metric of the gate", value="accuracy",
              hint="one that devices measure, such as accuracy; empty: no gate between the stages"),
        Field("better", "Better is", "choice", "higher", options=("higher", "lower")),
        Field("range", "Largest value that it can have", "real", "1",
              hint="1 for an accuracy; what is beyond it on any device is no measurement"),
        Field("max_loss", "Worse than the promoted version by at most", "real", "0.01",
              hint="empty: the promoted version is not measured"),
        Field("worst", "And no worse than", "real", hint="a gate needs this or the one before"),
        Field("min_devices", "Fewest devices of an evaluation", "whole", str(least),
              hint=f"`min_devices`; the population has {enrolled}, and a stage its share of them"),
        Field("max_devices", "Most devices of an evaluation", "whole", str(most),
              hint="`max_devices`; more than half of these have to come, or what the bundle's policy says"),
        Field("privacy", "Privacy", "choice", "secure", options=("secure", "plain")),
        Field("seconds", "Seconds for an evaluation", "real", "3600"),
        Field("eligibility", "Eligibility", hint="an expression over attributes of devices; empty: all of them"),
    )  # fmt: skip


def _rollout_body(desk: Desk, values: dict[str, Any], arguments: dict[str, str]) -> dict[str, Any]:
    gate: Any = "none"
    names = ("metric", "better", "range", "max_loss", "worst", "min_devices", "max_devices", "privacy", "seconds")
    asked = {name: values[name] for name in names if name in values}
    if "metric" in asked:
        gate = asked
    kept: dict[str, Any] = {name: values[name] for name in ("stages", "eligibility") if name in values}
    return {**kept, "gate": gate, "model": arguments["name"], "version": int(arguments["number"])}


def _as_they_are(desk: Desk, values: dict[str, Any], arguments: dict[str, str]) -> dict[str, Any]:
    return values


MAKERS = (
    Maker(
        f"{ROOT}/tasks/new", "create_task", "New task", _task_fields, _task_body,
        made=lambda task: f"{ROOT}/tasks/{task.task_id}", back=lambda _: f"{ROOT}/tasks",
        hint="The bundle has to be on the server.", bundled=True,
    ),
    Maker(
        f"{ROOT}/new-model", "create_model", "New model", _model_fields, _as_they_are,
        made=lambda model: f"{ROOT}/models/{model.name}", back=lambda _: f"{ROOT}/models",
    ),
    Maker(
        f"{ROOT}/models/<name:name>/register", "register_version", "Register a version", _version_fields, _as_they_are,
        made=lambda version: f"{ROOT}/models/{version.model}/versions/{version.number}",
        back=lambda arguments: f"{ROOT}/models/{arguments['name']}", takes=("name",), of="show_model",
        hint="Give a bundle, or a training.", bundled=True,
    ),
    Maker(
        f"{ROOT}/models/<name:name>/versions/<number:number>/rollout", "create_rollout", "Roll out", _rollout_fields,
        _rollout_body, made=lambda rollout: f"{ROOT}/rollouts/{rollout.rollout_id}",
        back=lambda arguments: f"{ROOT}/models/{arguments['name']}/versions/{arguments['number']}", of="show_version",
    ),
)  # fmt: skip
PAGES = tuple(page for maker in MAKERS for page in maker.pages)
