"""One question, one answer of 8 bytes, on the standard library alone: it starts in a few hundredths of a second."""

import http.client
import json
import os
from urllib.parse import urlsplit


def main() -> None:
    """Ask, and write the answer down."""
    with open(os.environ["GYRE_TASK"]) as file:
        task = json.load(file)
    asked = {
        "model": os.environ.get("GYRE_MODEL", "policy"),
        "messages": [{"role": "user", "content": f"say {task['cue'] * 24}"}],
        "max_tokens": 8,
        "temperature": 1.0,
    }
    endpoint = urlsplit(os.environ["OPENAI_BASE_URL"])
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    connection = http.client.HTTPConnection(endpoint.netloc)
    connection.request("POST", f"{endpoint.path}/chat/completions", json.dumps(asked), headers)
    answer = json.load(connection.getresponse())["choices"][0]["message"]["content"]
    with open("answer.txt", "w", encoding="utf-8", newline="") as file:
        file.write(answer)


if __name__ == "__main__":
    main()
