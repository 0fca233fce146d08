"""Hides secrets in texts that others may read: messages, logs, reports, records. Standard library only."""

import re

# Not every key and token: `pad_token`, `image_key`.
_SECRET = (
    r"(?:(?:access|account|api|auth|bearer|client|encryption|github|hf|hub|id|login|private|refresh|sas|secret"
    r"|security|session|shared|signing|ssh|storage|wandb)[_-]?(?:key|token)|\btoken"
    r"|secret|passwd|password|passphrase|credentials?|signature)"
)
# In capitals it is a variable of the environment.
_SECRET_NAME = re.compile(rf"(^|[_\-.])(KEY|TOKEN|(?i:{_SECRET}))$")
_HIDDEN = "[redacted]"
# Lengths are bounded, so that no text makes these slow. Group 1 is what precedes the secret.
_SECRETS = tuple(
    re.compile(pattern)
    for pattern in (
        # a private key, also one line of JSON, also with its first or last lines cut off
        r"()-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----(?s:.*?)(?:-----END [A-Z ]{0,40}PRIVATE KEY-----|\Z)",
        r"()(?m:(?:^[A-Za-z0-9+/=]{16,100}+[ \r]?\n){1,80})-----END [A-Z ]{0,40}PRIVATE KEY-----",
        # a URL's user and password; a token in the user's place
        r"(?i)(\b[a-z][a-z0-9+.-]{0,20}://[^\s/:@'\"]{0,200}:)[^\s/@'\"]{1,500}(?=@)",
        r"(?i)(\bhttps?://)[^\s/:@'\"]{12,500}(?=@)",
        # a header: all that follows on its line
        r"(?i)(\b(?:proxy-)?authorization['\"]?\s{0,5}[:=]\s{0,5}['\"]?)[^'\"\n\r]{1,4000}",
        r"(?i)(\b(?:set-)?cookie['\"]?\s{0,5}:\s{0,5}['\"]?)[^'\"\n\r]{1,4000}",
        r"(\b[Bb]earer\s{1,5})[A-Za-z0-9._~+/=-]{8,}",
        r"(\bBasic\s{1,5})(?=\S{0,500}(?:[a-z][A-Z]|\d|=))[A-Za-z0-9+/]{8,}={0,2}",
        # clouds' and services' own forms: AWS, Google, JWT, GitHub, Hugging Face, Slack, OpenAI
        r"()\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",
        r"()\bAIza[\w-]{35}|\bya29\.[\w.-]{10,}",
        r"()\beyJ[\w-]{5,}\.[\w-]{5,}\.[\w-]{0,}",
        r"()\b(?:gh[pousr]_|github_pat_|hf_|xox[abprs]-|sk-)[\w-]{16,}",
        # name=value, "name": "value" (not `next_token:Net`, nor after 41 letters); in a URL ?sig=value
        r"(?i)((?<![^?&;])sig=)[^\s'\",}&;]{1,4000}",
        rf"(?i)((?<!\w{{41}})(?:{_SECRET}|pwd|(?:key|token)(?!:\w))['\"]?\s{{0,5}}[=:]\s{{0,5}})"
        r"(?:\"[^\"\n]{1,4000}\"|'[^'\n]{1,4000}'|['\"]?[^\s'\",}&]{1,4000})",
    )
)


def is_secret_name(name: str) -> bool:
    """Whether a value of this name should not be seen by others: api_key, MY_TOKEN, password, ..."""
    return _SECRET_NAME.search(name) is not None


def redact(text: str) -> str:
    """`text` without secrets: private keys, passwords and signatures in URLs, authorization headers, keys of
    clouds, and the values of what is named key, token, secret, password or the like.
    """
    for pattern in _SECRETS:
        text = pattern.sub(rf"\1{_HIDDEN}", text)
    return text


def describe(err: BaseException) -> str:
    """Type and first line of an error, without secrets, for one-line warnings."""
    lines = redact(str(err)).strip().splitlines()
    return f"{type(err).__name__}: {lines[0][:300]}" if lines else type(err).__name__
