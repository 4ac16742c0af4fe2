"""A bundle has no secret in it, wherever the secret stands and however it is written there."""

import json
import tomllib
import zipfile

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from smalti.config import draft
from smalti.plugins import Selection, load_plugins, schema_of
from smalti.rundir import RunDirectory
from smalti.types import Finding
from smalti_doctor.bundle import write_bundle
from smalti_doctor.masking import Mask, is_secret_name
from smalti_doctor.report import Report, Section

CHARACTERS = st.sampled_from("\"'\\/+%&=: \u2028\u00e9abcXYZ019") | st.characters(exclude_categories=("Cs", "Cc"))
SECRETS = st.text(CHARACTERS.filter(lambda each: each != "*"), min_size=8, max_size=40).filter(
    lambda text: len(text.strip()) >= 8 and text.strip("-=_. ") != ""
)


def strings(value: object):
    if isinstance(value, dict):
        for key, each in value.items():
            yield from (key, *strings(each))
    elif isinstance(value, list):
        for each in value:
            yield from strings(each)
    elif isinstance(value, str):
        yield value


def texts(archive: zipfile.ZipFile):
    """Every text in the archive: names, contents, and strings in JSON as their reader gets them."""
    for name in archive.namelist():
        content = archive.read(name).decode()
        yield from (name, content)
        if name.endswith(".toml"):
            yield from strings(tomllib.loads(content))
        for line in [content] if name.endswith(".json") else content.split("\n"):
            try:
                yield from strings(json.loads(line))
            except ValueError:
                continue


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(secret=SECRETS, number=st.integers(0, 10**9))
def test_no_bundle_has_a_secret_of_the_environment_or_the_configuration(tmp_path_factory, secret, number):
    folder = tmp_path_factory.mktemp("run")
    run = RunDirectory(folder)
    message = f"403 for https://user:{secret.strip()}@store/x?key={number}, sent {secret}"
    run.record_file.write_text(json.dumps({"kind": "smalti-run", "note": message}))
    run.events_file.write_text(
        "".join(
            json.dumps({"kind": "error", "message": message, secret: [{"deep": secret}]}, ensure_ascii=odd) + "\n"
            for odd in (True, False)
        )
    )
    (folder / "hangs").mkdir()
    (folder / "hangs" / "rank-0.txt").write_text(f"File x.py\n  token = {secret!r}\n")
    mask = Mask.of_node(environment={"MY_API_TOKEN": secret, "HOME": "/root", "HF_HOME": str(folder / "hf")})
    finding = Finding(check="x", level="note", message=message)
    report = Report(
        sections=(Section(name="software", facts={"packages": {"numpy": "2.0"}, "why": secret}, findings=[finding]),)
    )
    members = write_bundle(folder / "out.zip", report, mask, config=f"note = {json.dumps(message)}\n", run=run)
    assert {"doctor.json", "run/run.json", "run/events.jsonl", "run/hangs/rank-0.txt", "config.toml"} <= set(members)
    with zipfile.ZipFile(folder / "out.zip") as archive:
        assert [text for text in texts(archive) if secret in text or secret.strip() in text] == []


@pytest.mark.parametrize(
    "text",
    [
        "hf_AbCdEfGhIjKlMnOpQrStUv",
        "AKIAIOSFODNN7EXAMPLE",
        "Authorization: Bearer abc.def-ghi_jkl",
        "https://discord.com/api/webhooks/123456/SeCrEtToKeN-x_y",
        "https://hooks.slack.com/services/T0/B0/SeCrEt",
        "https://store/x.png?X-Amz-Credential=SeCrEt%2F1&X-Amz-Signature=SeCrEt",
        "postgres://me:SeCrEt@host/db",
        'aws_secret_access_key = "SeCrEt/with+signs"',
        "password: SeCrEt",
        'message = "403 for x, token: SeCrEt"',
        '{"client_secret": "SeCrEt"}',
        "-----BEGIN OPENSSH PRIVATE KEY-----\nSeCrEt\n-----END OPENSSH PRIVATE KEY-----",
    ],
)
def test_texts_that_look_like_a_secret_are_replaced_though_nobody_has_named_them(text):
    masked = Mask().text(text)
    assert "***" in masked
    assert not any(part in masked for part in ("SeCrEt", "AbCdEf", "AKIA", "abc.def"))


def test_ordinary_texts_stay_as_they_are():
    ordinary = (
        'tokenizer = "t5"\nmax_tokens = 77\nlearning_rate = 1e-4\nkey: photos/cat.png\ntokens: 1,024 per image at 512x512\n'
        "https://huggingface.co/black-forest-labs/FLUX.1-dev?revision=main\ncaption: a secret garden, passwords on a wall\n"
    )
    assert Mask().text(ordinary) == ordinary


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        *(
            (name, True)
            for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "aws_access_key_id", "PASSWORD", "webhook_secret", "dsn")
        ),
        *(
            (name, False)
            for name in ("tokenizer", "tokens", "keys", "learning_rate", "PATH", "monkey", "author", "trigger_token")
        ),
    ],
)
def test_names_of_secrets(name, secret):
    assert is_secret_name(name) is secret


@pytest.mark.parametrize("in_a_file", [False, True])
def test_what_stands_for_env_and_addresses_of_receivers_are_replaced_though_their_names_say_nothing(tmp_path, in_a_file):
    endpoints = json.dumps([{"url": "https://example.org/hook/very-hidden"}])
    (tmp_path / "webhooks.json").write_text(endpoints)
    given = str(tmp_path / "webhooks.json") if in_a_file else endpoints
    environment = {"PHRASE": "an unusual phrase", "SMALTI_WEBHOOK_CONFIG": given}
    schema = schema_of(load_plugins(Selection(only=("toy", "webhooks"))))
    config = draft(schema, ["--instance_prompt={env:PHRASE}", "--seed=-1"], environment=environment)
    assert config.problems
    masked = Mask.of_run(config, environment).text("prompt: an unusual phrase; https://example.org/hook/very-hidden: 410 Gone")
    assert masked == "prompt: ***; ***: 410 Gone"
