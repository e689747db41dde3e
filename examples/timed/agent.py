"""Asks for as many tokens as an execution of this task is to take in time, in a conversation of a few requests.

On plain sockets, and started with `python -S -E`, it costs 20 ms of CPU: the machine belongs to the run and not to it.
"""

import json
import os
import socket


def ask(host: str, port: int, path: str, body: dict) -> str:
    """The content of the answer to one chat request."""
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nAuthorization: Bearer {os.environ['OPENAI_API_KEY']}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    )
    with socket.create_connection((host, port)) as connection:
        connection.sendall(head.encode() + data)
        received = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    head, _, content = received.partition(b"\r\n\r\n")
    if not head.split(b"\r\n")[0].endswith(b"200 OK"):
        raise SystemExit(f"the endpoint answered {received[:500]!r}")
    return json.loads(content)["choices"][0]["message"]["content"]


def main() -> None:
    """Have the conversation."""
    with open(os.environ["GYRE_TASK"]) as file:
        task = json.load(file)
    place, _, path = os.environ["OPENAI_BASE_URL"].removeprefix("http://").partition("/")
    host, _, port = place.partition(":")
    tokens = task["tokens"][int(os.environ["GYRE_EXECUTION"]) % len(task["tokens"])]  # of this member of the group
    requests = min(task["requests"], tokens)
    messages = []
    for turn in range(requests):
        share = tokens * (turn + 1) // requests - tokens * turn // requests
        messages.append({"role": "user", "content": "go on"})
        asked = {"model": os.environ["GYRE_MODEL"], "messages": messages, "max_tokens": share, "temperature": 1.0}
        messages.append({"role": "assistant", "content": ask(host, int(port), f"/{path}/chat/completions", asked)})
    with open("answer.txt", "w") as file:
        file.write("".join(message["content"] for message in messages[1::2]))


main()
