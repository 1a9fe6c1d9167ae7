"""The commands of the program `offload`, one module each; torch is imported only where a command
needs it.
"""

from offload.commands import bench, info, pack, run

COMMANDS = (run, pack, info, bench)
