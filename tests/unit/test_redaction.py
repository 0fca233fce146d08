"""Secrets in texts are hidden, other texts are unchanged, and none takes long."""

import pytest

from cyxjax.redaction import redact

PEM = """-----BEGIN RSA PRIVATE KEY-----
MIIhunter2hunter2hunter2
hunter2hunter2hunter2==
-----END RSA PRIVATE KEY-----"""
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJodW50ZXIyIjoxfQ.c2lnbmF0dXJl"
SECRETS = {
    "name=": ("api_key=hunter2", "hunter2"),
    "name:": ("X-Auth-Token:hunter2", "hunter2"),
    "variable": ("GITLAB_TOKEN=hunter2", "hunter2"),
    "NAME:": ("WANDB_API_KEY: hunter2", "hunter2"),
    "quoted": ("token='hunter2 with spaces'", "spaces"),
    "json": ('"password": "hunter2"', "hunter2"),
    "header": ("X-Secret=hunter2", "hunter2"),
    "url": ("cannot reach postgres://me:hunter2@db.example:5432/runs", "hunter2"),
    "url of a proxy": ("http_proxy=http://user:hunter2@proxy:3128/", "hunter2"),
    "token in a url": ("https://hunter2hunter2hunter2@github.com/o/r.git", "hunter2"),
    "bearer": ("curl -H 'Authorization: Bearer hunter2.hunter2-hunter2'", "hunter2"),
    "bare bearer": ("sent Bearer hunter2hunter2", "hunter2"),
    "basic": ("{'Authorization': 'Basic aHVudGVyMjpodW50ZXIy'}", "aHVudGVy"),
    "bare basic": ("with Basic aHVudGVyMjpodW50ZXIy", "aHVudGVy"),
    "aws id": ("user AKIAIOSFODNN7EXAMPLE may not", "AKIAIOSFODNN7EXAMPLE"),
    "aws secret": ("aws_secret_access_key = wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "wJalr"),
    "aws url": (
        "GET https://b.s3.amazonaws.com/x?X-Amz-Credential=AKIAIOSFODNN7EXAMPLE%2F2026&X-Amz-Expires=60"
        "&X-Amz-Security-Token=hunter2&X-Amz-Signature=fe5f80f77d5fa3beca038a248ff027d0445342fe",
        "fe5f80f77d5f",
    ),
    "aws header": (
        "Authorization: AWS4-HMAC-SHA256 Credential=x/20260101/us-east-1/s3/aws4_request, Signature=hunter2",
        "hunter2",
    ),
    "google key": ("key AIzaSyDhunter2hunter2hunter2hunter2hunter for", "AIzaSyD"),
    "google token": ("ya29.a0hunter2hunter2_hunter2 expired", "hunter2"),
    "google url": ("https://storage.googleapis.com/b/o?X-Goog-Signature=hunter2&x=1", "hunter2"),
    "google account": (
        '{"private_key": "-----BEGIN PRIVATE KEY-----\\nhunter2\\n-----END PRIVATE KEY-----\\n"}',
        "hunter2",
    ),
    "azure sas": (
        "https://a.blob.core.windows.net/c/f?sv=2024-11-04&sp=r&sig=hunter2%2Bhunter2%3D",
        "hunter2",
    ),
    "azure connection": ("AccountName=a;AccountKey=hunter2hunter2==;EndpointSuffix=core", "hunter2"),
    "private key": (f"key file:\n{PEM}\n", "hunter2"),
    "private key cut off above": (PEM.partition("\n")[2], "hunter2"),
    "private key cut off below": (PEM.rpartition("\n")[0], "hunter2"),
    "jwt": (f"got {JWT} back", "eyJodW50ZXIy"),
    "github": ("ghp_hunter2hunter2hunter2hunter2hunter2", "hunter2"),
    "hugging face": ("hf_hunter2hunter2hunter2hunter2 is invalid", "hunter2"),
    "cookie": ("Cookie: session=hunter2; other=hunter2", "hunter2"),
}


@pytest.mark.parametrize("name", SECRETS)
def test_secrets_are_hidden(name):
    text, secret = SECRETS[name]
    assert secret in text
    hidden = redact(f"before {text}\nafter" if "cut off" not in name else text)
    assert secret not in hidden, hidden
    assert "[redacted]" in hidden
    if "cut off" not in name:
        assert hidden.startswith("before ")
        assert hidden.endswith("\nafter")


@pytest.mark.parametrize(
    "text",
    [
        "monkey business at key frame 7",
        "KeyError: 'kernel'",
        "num_tokens: 512, tokenizer=bpe",
        "model my.next_token:Net and data monkey:load",
        "ssh://git@github.com/o/r.git at https://example.com:8080/a@b",
        "Basic configuration of a bearer of news",
        "float32[784,256] at /home/me/train.py:12",
        "rank 3 on host-1.example:29500, design=2, sign = 1",
    ],
)
def test_what_is_no_secret_stays(text):
    assert redact(text) == text


LONG = ["a-", "key", "://a:", "-----BEGIN PRIVATE KEY-----", "A" * 64 + "\n", "eyJ.", "sig="]


@pytest.mark.parametrize("piece", LONG)
@pytest.mark.timeout(120)  # quadratic time would take an hour
def test_no_text_makes_redaction_slow(piece):
    text = piece * (200_000 // len(piece))
    assert redact(text).startswith(piece[:1]) or "[redacted]" in redact(text)
