"""/openapi.json describes the routes, and requests made from it at random find no fault of the server."""

import importlib.util
import subprocess
import sys

import pytest


def test_every_route_that_takes_a_body_describes_it(server):
    found = server.http.get("/openapi.json").json()
    posts = {path for path, methods in found["paths"].items() if "post" in methods}
    assert posts == {"/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"}
    for path in posts:
        schema = found["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert schema["type"] == "object" and schema["properties"]
        assert "$ref" not in str(schema)
    chat = found["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert chat["required"] == ["messages"] and "tree_budget" in chat["properties"]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("schemathesis") is None, reason="needs schemathesis")
def test_random_requests_find_no_5xx(server, tmp_path):
    code = "import sys; from schemathesis.cli import schemathesis; sys.exit(schemathesis())"
    flags = ["--checks", "not_a_server_error", "--max-examples", "25", "--phases", "coverage,fuzzing", "--seed", "7"]
    command = [sys.executable, "-c", code, "run", f"{server.url}/openapi.json", *flags, "--request-timeout", "60"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert server.metric("http_responses_total", status="500") == 0
    assert server.http.get("/health").status_code == 200
