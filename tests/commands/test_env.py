import json

from draftwood import cli, env


def test_env_ends_with_its_findings_as_one_json_line(capsys):
    assert cli.main(["env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = json.loads(lines[-1])
    assert set(found) == {"versions", "machine", "devices", "kernels", "environment"}
    assert found["versions"]["draftwood"]
    assert found["devices"][0]["name"] == "cpu"
    assert set(found["environment"]) == set(env.TABLE)
    assert len(lines) > 20
