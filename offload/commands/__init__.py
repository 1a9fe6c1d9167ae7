"""The commands of the program `offload`, one module each; torch is imported only where a command
needs it.
"""

from offload.commands import bench, info, pack, plan, run

COMMANDS = (run, pack, plan, info, bench)
