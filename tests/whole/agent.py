"""The harness of the whole-run tests: one question, standard library alone; as slow as the task says."""

import json
import os
import time
import urllib.request

task = json.load(open(os.environ["GYRE_TASK"]))
body = {"model": "policy", "messages": [{"role": "user", "content": task["text"]}], "max_tokens": 8, "temperature": 1.0}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps(body).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
)
with urllib.request.urlopen(request) as response:
    answer = json.load(response)["choices"][0]["message"]["content"]
time.sleep(task.get("sleep", 0))
with open("answer.txt", "w") as file:
    file.write(answer)
