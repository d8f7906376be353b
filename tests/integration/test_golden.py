"""20 steps on fixed weights, responses and scores compute what tests/golden.json holds."""

import json

import golden
import pytest

RELATIVE, ABSOLUTE = 2e-4, 2e-5
"""Tolerance of a metric on another processor or another torch: 20 steps of Adam amplify the last digit.

Between an Intel Xeon and an AMD EPYC they amplify it further in the case jsd, to 7e-4: each has digits of its own.
"""
STORED = json.loads(golden.FILE.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def results(request):
    """Return the results of the requested cases."""
    return golden.run([item.callspec.params["case"] for item in request.session.items if item.path == request.path])


@pytest.mark.parametrize("case", golden.CASES)
def test_a_run_computes_what_it_always_did(case, results):
    found = results[case]
    assert len(found["steps"]) == golden.STEPS
    mine = [stored for stored in STORED[case] if golden.is_of(found["machine"], stored["machine"])]
    if mine:
        assert known(found, mine[0]) == mine[0]["steps"]
        assert found["weights_sha256"] == mine[0]["weights_sha256"]
        return
    differences = [difference(found, stored) for stored in STORED[case]]
    assert None in differences, differences


def known(found, stored):
    """The steps of `found`, of each the metrics that are stored: others may have been added."""
    return [{name: now[name] for name in then} for now, then in zip(found["steps"], stored["steps"], strict=True)]


def difference(found, stored):
    """Return the values outside of the tolerance, None if there are none."""
    pairs = [*zip(known(found, stored), stored["steps"], strict=True), (found["norms"], stored["norms"])]
    for number, (now, then) in enumerate(pairs):
        absolute = ABSOLUTE if number < len(pairs) - 1 else 0.0
        for name in then:
            if now.keys() != then.keys() or now[name] != pytest.approx(then[name], rel=RELATIVE, abs=absolute):
                return stored["machine"]["processor"], number, name, now.get(name), then[name]
    return None
