"""The options of `archipel convert` for the privacy policy: bounds that devices insist on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click
import msgspec

from archipel.bundle import PrivacyPolicy
from archipel.cli.input_output.option_group import option_group
from archipel.cli.input_output.settings import Setting, read_settings, settings_of
from archipel.converter.request import DEFAULT_PRIVACY
from archipel.errors import CommandError
from archipel.protocol import written
from archipel.toml_files import read_toml


@dataclass(frozen=True)
class PolicyOptions:
    """The fields of a privacy policy that differ from those that `convert` has without any."""

    policy: Path | None
    policy_option: tuple[str, ...]

    def privacy(self) -> PrivacyPolicy:
        """The policy. Raises CommandError for a field that there is not, or of another type; OSError."""
        policy = DEFAULT_PRIVACY
        if self.policy is not None:
            try:
                policy = written.convert({**msgspec.structs.asdict(policy), **read_toml(self.policy)}, PrivacyPolicy)
            except ValueError as error:
                raise CommandError(f"--policy {self.policy}: {error}") from None
        given = read_settings("--policy-option", self.policy_option, policy_settings(), "a privacy policy")
        return msgspec.structs.replace(policy, **given)


def policy_settings() -> dict[str, Setting]:
    """The fields of a policy by name, with the values that `convert` has for them."""
    return {
        name: Setting(name, setting.hint, getattr(DEFAULT_PRIVACY, name))
        for name, setting in settings_of(PrivacyPolicy).items()
    }


policy_options = option_group(
    "policy",
    PolicyOptions,
    click.option("--policy", type=click.Path(path_type=Path), metavar="TOML",
                 help="The privacy policy: bounds that devices insist on, as lines such as min_cohort = 20. "
                 "--list policy lists all fields with their defaults."),
    click.option("--policy-option", multiple=True, metavar="NAME=VALUE",
                 help="A field of the policy, such as min_cohort=3 or modes=secure,plain; may be given several times, "
                 "and wins over --policy."),
)  # fmt: skip
