"""python -m flows.cli.begin NOTE FACTS COMMAND…: note who this process is, then become the command.

So a caller that is killed in between leaves no process that nobody knows.
"""

import json
import os
import sys
from pathlib import Path

from miles_core.store.files import Files
from miles_core.store.process import start_of


def main(note: str, facts: str, *command: str) -> None:
    """Write the note as one, and never return."""
    path, mine = Path(note), os.getpid()
    body = json.loads(facts) | {"pid": mine, "started": start_of(mine)}
    Files(str(path.parent)).replace(path.name, json.dumps(body).encode())
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])
