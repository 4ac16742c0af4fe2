"""How `--webhook_config` is read, and what is refused with which message."""

import json

import pytest

from smalti_health.webhooks.endpoints import holds_secret, read, redacted, shown_url
from smalti_health.webhooks.signing import decode_key, signed_headers

URL = "https://hooks.example.com/a"
KEY = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


def entry(**values: object) -> dict[str, object]:
    return {"webhook_type": "raw", "callback_url": URL, **values}


def endpoints(value: object, environment: dict[str, str] | None = None):
    problems: list = []
    found = read(value if isinstance(value, str) else json.dumps(value), environment or {}, problems)
    assert problems == []
    return found


def complaint(**values: object) -> str:
    problems: list = []
    assert read(json.dumps(entry(**values)), {}, problems) == ()
    return "; ".join(str(each) for each in problems)


def test_an_object_a_list_and_a_file_are_read_alike(tmp_path):
    for name in ("webhooks.json", "without-ending"):
        (tmp_path / name).write_text(json.dumps([entry()]))
        assert endpoints(str(tmp_path / name)) == endpoints(entry()) == endpoints([entry()])


def test_several_endpoints_are_read_and_comments_are_left_out():
    found = endpoints([entry(_comment="mine"), entry(webhook_type="discord", log_level="error", auth_token=None)])
    assert [(each.kind, each.level) for each in found] == [("raw", "info"), ("discord", "error")]


@pytest.mark.parametrize("kind", ["discord", "raw"])
@pytest.mark.parametrize("key", ["webhook_url", "callback_url"])
def test_both_kinds_take_the_url_under_both_names(kind, key):
    [found] = endpoints({"webhook_type": kind, key: URL})
    assert found.url == URL


def test_variables_are_replaced_in_a_file(tmp_path):
    file = tmp_path / "webhooks.json"
    file.write_text(json.dumps(entry(auth_token="{env:TOKEN}")))
    [found] = endpoints(str(file), {"TOKEN": "abc"})
    assert found.auth_token == "abc"
    problems: list = []
    assert read(str(file), {}, problems) == ()
    assert "TOKEN}: this environment variable is not set" in str(problems[0])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"webhook_type": "slack"}, "webhook_type is neither discord nor raw"),
        ({"webhook_type": None}, "webhook_type is missing"),
        ({"callback_url": None}, "webhook_url is missing"),
        ({"webhook_url": "https://other.example.com"}, "webhook_url and callback_url differ"),
        ({"callback_url": "ftp://hooks.example.com/a"}, "its URL is not valid"),
        ({"callback_url": "https://hooks.example.com/a b"}, "its URL is not valid"),
        ({"callback_url": "https://hooks.example.com/a\r\nX: y"}, "its URL is not valid"),
        ({"callback_url": "https://hooks.example.com:99999/"}, "its URL is not valid"),
        ({"callback_url": "https://me:pw@hooks.example.com/"}, "has a user name or password"),
        ({"callback_url": "http://127.0.0.1/a"}, "is a loopback address"),
        ({"callback_url": "http://localhost:8000/a"}, "is a loopback address"),
        ({"callback_url": "http://[::ffff:10.0.0.1]/a"}, "is a private or reserved address"),
        ({"callback_url": "http://169.254.169.254/latest"}, "is an address of cloud metadata"),
        ({"log_level": "loud"}, "log_level is not a level"),
        ({"log_levels": "info"}, "did you mean log_level?"),
        ({"secret": "whsec_short"}, "secret is not a signing key"),
        ({"secret": "whsec_QUJD"}, "it has 3 bytes, not 24 to 64"),
        ({"headers": {"X-A": "a\r\nB: c"}}, "the header X-A has a value that HTTP does not allow"),
        ({"headers": {"X A": "a"}}, "a header has a name that HTTP does not allow"),
        ({"headers": {"Host": "a"}}, "the header Host is set by smalti"),
        ({"headers": {"webhook-id": "a"}}, "the header webhook-id is set by smalti"),
        ({"headers": [1]}, "headers are not a table"),
        ({"auth_token": "a\nb"}, "X-API-Key has a value that HTTP does not allow"),
        ({"allow_private": "yes"}, "allow_private is neither true nor false"),
        ({"webhook_type": "discord", "secret": KEY}, "Discord does not verify signatures"),
    ],
)
def test_a_wrong_entry_is_refused_with_its_reason(values, message):
    assert message in complaint(**values)


@pytest.mark.parametrize(
    ("text", "message"), [("{", "this is not JSON"), ("[]", "a table or a list"), ("[1]", "a list of tables")]
)
def test_what_is_no_list_of_tables_is_refused(text, message):
    problems: list = []
    assert read(text, {}, problems) == ()
    assert message in problems[0].message


@pytest.mark.parametrize(
    "values",
    [
        {"auth_token": "MARKER-5ECRET\n"},
        {"callback_url": "https://user:MARKER-5ECRET@h.example.com/"},
        {"callback_url": "http://10.0.0.1/MARKER-5ECRET?MARKER-5ECRET"},
        {"callback_url": "nonsense MARKER-5ECRET"},
        {"secret": "MARKER-5ECRET"},
        {"secret": ["MARKER-5ECRET", 4]},
        {"headers": {"X-Y": "MARKER-5ECRET\n"}},
    ],
)
def test_no_message_about_a_wrong_entry_shows_a_secret(values):
    assert "MARKER-5ECRET" not in complaint(**values)


def test_a_private_address_is_accepted_where_the_endpoint_says_so():
    [found] = endpoints(entry(callback_url="http://127.0.0.1:9/a", allow_private=True))
    assert found.allow_private


@pytest.mark.parametrize(
    ("value", "secret"),
    [
        ("webhooks.json", False),
        (json.dumps(entry()), False),
        (entry(callback_url="http://127.0.0.1:8001/callback"), False),
        (entry(auth_token="{env:TOKEN}"), False),
        (entry(callback_url="https://discord.com/api/webhooks/{env:ID}/{env:TOKEN}"), False),
        (entry(callback_url="{env:URL}"), False),
        (entry(secret=["{env:NEW}", "{env:OLD}"]), False),
        (entry(headers={"X-Team": "vision"}), False),
        (entry(auth_token="abc"), True),
        (json.dumps([entry(), entry(auth_token="abc")]), True),
        (entry(callback_url="https://discord.com/api/webhooks/1/abc"), True),
        (entry(callback_url="https://hooks.example.com/services/0123456789abcdef01"), True),
        (entry(callback_url="https://hooks.example.com/a?key=b"), True),
        (entry(secret=["{env:NEW}", KEY]), True),
        (entry(headers={"Authorization": "Bearer abc"}), True),
        ("{not JSON", True),
    ],
)
def test_an_inline_value_is_a_secret_if_it_has_one_that_is_not_a_variable(value, secret):
    assert holds_secret(value) is secret


def test_urls_are_shown_without_what_may_be_secret():
    assert shown_url("https://hooks.example.com:8443/a/b?c=d") == "https://hooks.example.com:8443/..."
    [found] = endpoints(entry(auth_token="tok-en-1", secret=KEY, headers={"Authorization": "Bearer xyz"}))
    text = f"{URL} tok-en-1 {KEY} {KEY.removeprefix('whsec_')} Bearer xyz"
    assert redacted(text, [found]).replace(".", "").split() == []
    assert not any(each in repr(found) for each in text.split())


def test_signatures_are_those_of_the_specification():
    body = b'{"test": 2432232314}'
    headers = signed_headers([KEY], "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, body)
    assert headers == {
        "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
        "webhook-timestamp": "1614265330",
        "webhook-signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
    }


def test_a_message_is_signed_with_the_new_and_the_old_key():
    other = "whsec_" + "A" * 32
    both = signed_headers([other, KEY], "msg_1", 5, b"{}")["webhook-signature"].split(" ")
    alone = [signed_headers([key], "msg_1", 5, b"{}")["webhook-signature"] for key in (other, KEY)]
    assert both == alone


def test_an_endpoint_without_a_key_gets_no_signature_but_an_id():
    assert sorted(signed_headers([], "msg_1", 5, b"{}")) == ["webhook-id", "webhook-timestamp"]


@pytest.mark.parametrize("key", ["", "whsec_", "whsec_####", "ä" * 40, "A" * 92])
def test_what_is_no_key_is_refused(key):
    with pytest.raises(ValueError, match=r"base64|bytes"):
        decode_key(key)
