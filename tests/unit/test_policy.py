"""The policy section: defaults, refusals, and a file of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

import surefoot
from surefoot.errors import UsageError
from surefoot.events import AnomalyKind, Severity
from surefoot.policy import PolicySpec, RungAction, RungSpec
from surefoot.spec import load_spec, parse_spec, spec_keys

DEMO_POLICY = Path(surefoot.__file__).parent / "cli" / "demo_policy.yaml"


def spec_with(policy: object) -> dict[str, object]:
    return {"job": "demo", "entrypoint": "train.py", "policy": policy}


@pytest.mark.parametrize("kind", AnomalyKind)
def test_the_default_ladder_has_an_answer_to_every_kind_and_ends_with_a_stop(kind: AnomalyKind) -> None:
    ladder = [rung for rung in PolicySpec().ladder if rung.fits(kind, Severity.CRITICAL)]
    assert ladder[-1].action is RungAction.STOP
    assert RungAction.ROLLBACK in {rung.action for rung in ladder}
    assert not any(rung.fits(kind, Severity.WARNING) for rung in ladder)


def test_severity_is_a_least_severity() -> None:
    rung = RungSpec(name="r", action=RungAction.NONE, severity=Severity.WARNING, kinds=(AnomalyKind.SPIKE,))
    assert rung.fits(AnomalyKind.SPIKE, Severity.CRITICAL)
    assert rung.fits(AnomalyKind.SPIKE, Severity.WARNING)
    assert not rung.fits(AnomalyKind.SPIKE, Severity.NOTICE)
    assert not rung.fits(AnomalyKind.DIVERGENCE, Severity.CRITICAL)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"ladder": []}, "policy: ladder: needs a rung"),
        ({"ladder": [{"name": "a", "action": "stop"}] * 2}, "repeated: a"),
        ({"ladder": [{"name": "a", "action": "stop", "on": 1}]}, "policy.ladder.0.on: unknown key; allowed here: name"),
        ({"ladder": [{"name": "a", "action": "explode"}]}, "policy.ladder.0.action"),
        ({"mode": "maybe"}, "policy.mode: Input should be 'act', 'advise' or 'off'"),
        ({"lr": {"cut": 1.5}}, "policy.lr.cut"),
        ({"probation": 3}, "policy.probation: unknown key; allowed here: mode, probation_steps"),
        (None, "policy"),
    ],
)
def test_what_is_wrong_is_named(policy: object, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_spec(spec_with(policy))
    assert message in str(caught.value)


def test_a_spec_file_may_name_a_policy_file(tmp_path: Path) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text(yaml.safe_dump(spec_with(str(DEMO_POLICY))))
    policy = load_spec(file).policy
    assert (policy.probation_steps, policy.rollback_margin_steps) == (20, 10)
    assert [rung.action for rung in policy.ladder][-1] is RungAction.STOP


def test_a_policy_file_that_is_wrong_is_named(tmp_path: Path) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text(yaml.safe_dump(spec_with(str(tmp_path / "none.yaml"))))
    with pytest.raises(UsageError, match=r"none\.yaml: cannot be read: No such file"):
        load_spec(file)
    (tmp_path / "none.yaml").write_text("- a list")
    with pytest.raises(UsageError, match="must hold a mapping of keys such as mode"):
        load_spec(file)


def test_a_policy_survives_the_way_through_the_api() -> None:
    spec = parse_spec(spec_with(yaml.safe_load(DEMO_POLICY.read_text())))
    assert parse_spec(spec.model_dump(mode="json")) == spec
    assert PolicySpec.model_validate(spec.model_dump(mode="json")["policy"]) == spec.policy


def test_the_keys_are_listed() -> None:
    keys = {key.name: key for key in spec_keys()}
    assert keys["policy.ladder"].type == "list of sections"
    assert keys["policy.ladder.action"].type == "none or lr_cut or rollback or older_checkpoint or stop"
    assert all(key.description for key in keys.values())
