"""An example of each command: what stands after its name. Pure; tests read them with the parser."""

from __future__ import annotations

from typing import Final

EXAMPLES: Final = {
    "login": "https://tidegate.example --token-file token",
    "context": "use tidegate.example",
    "whoami": "",
    "get": "nodes --state ready -o wide",
    "describe": "workload/chat",
    "logs": "chat --tail 50",
    "explain": "0d5c1f4e-7a41-4b7e-9a55-2f1f1c7a3b60 --org acme",
    "top": "nodes --interval 5s",
    "wait": "workload/chat --for Ready --timeout 15m",
    "apply": "-f chat.yaml --reason 'a longer context' --dry-run",
    "diff": "-f chat.yaml",
    "delete": "workload/chat --reason 'nobody asks it any more'",
    "scale": "chat --replicas 3",
    "restart": "chat --reason 'new certificates'",
    "drain": "ax-2 --reason 'a new disk' --timeout 1h",
    "cordon": "cs-4 --reason 'it is measured'",
    "uncordon": "ax-2",
    "upgrade": "ax-2 --version 0.2.0",
    "upgrade-fleet": "--version 0.2.0 --label rack=7 --run 'ssh {node} upgrade-tidegate'",
    "restore-rails": "chat --dry-run",
    "acknowledge": "7 --reason 'the disk is ordered'",
    "unacknowledge": "7",
    "cancel": "12",
    "retry": "12 --reason 'the node is back'",
    "undo": "345 --reason 'the wrong org'",
    "rollout status": "chat --timeout 30m",
    "rollout history": "chat",
    "rollout pause": "chat --reason 'latency rises'",
    "rollout resume": "chat",
    "rollout undo": "chat --revision 2",
    "version": "--client",
    "completion": "bash",
}
