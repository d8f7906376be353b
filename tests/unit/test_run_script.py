"""What run_gkd.sh takes for an environment that can train as it is."""

import configparser
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODULES = {"pyzmq": "zmq"}
"""Distribution -> what it is imported as, where that differs."""


def test_an_environment_that_lacks_a_requirement_is_not_used():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lines = setup["options"]["install_requires"].splitlines()
    names = {match[0] for line in lines if (match := re.match(r"[a-zA-Z0-9_-]+", line))}
    required = {MODULES.get(name, name) for name in names}
    looked_for = re.search(r'^needed = "(.+)"\.split\(\)$', (ROOT / "run_gkd.sh").read_text(), re.MULTILINE)
    assert looked_for
    assert required - set(looked_for[1].split()) == {"wandb"}  # only imported where trainer.logger names it
