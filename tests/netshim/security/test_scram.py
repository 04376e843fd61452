"""SCRAM against the examples of the RFCs, and against messages that break its rules."""

from __future__ import annotations

import base64
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netshim.security import scram
from netshim.security.scram import ScramError, ScramState

#: The exchange of RFC 7677, section 3.
USER = "user"
PASSWORD = "pencil"
SALT = base64.b64decode("W22ZaJ0SNY7soEsUEjb6gQ==")
FIRST = b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO"
NONCE = "rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
FINAL = (
    b"c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,"
    b"p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
)
SERVER_FINAL = b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="


def credential(mechanism: str = "SCRAM-SHA-256") -> scram.Credential:
    salted = scram.salted_password(mechanism, PASSWORD, SALT, 4_096)
    return scram.credential_of(mechanism, salted, SALT, 4_096)


def rfc_state() -> ScramState:
    challenge = f"r={NONCE},s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096".encode()
    first = scram.parse_first(FIRST)
    return ScramState("SCRAM-SHA-256", first, credential(), NONCE, challenge)


def test_example_of_rfc_7677_is_accepted() -> None:
    assert scram.parse_first(FIRST).user == USER
    assert scram.verify(rfc_state(), FINAL) == SERVER_FINAL


def test_challenge_has_salt_iterations_and_both_nonces() -> None:
    first = scram.parse_first(FIRST)
    state = scram.challenge("SCRAM-SHA-256", first, credential(), bytes(24))
    nonce, salt, iterations = state.challenge.decode().split(",")
    assert nonce.startswith("r=" + first.nonce) and len(nonce) > len(first.nonce) + 20
    assert (salt, iterations) == ("s=W22ZaJ0SNY7soEsUEjb6gQ==", "i=4096")


def final_message(state: ScramState, nonce: str) -> bytes:
    """Return a client's final message with a correct proof for its own nonce."""
    salted = scram.salted_password(state.mechanism, PASSWORD, SALT, 4_096)
    name = scram.HASHES[state.mechanism]
    client_key = hmac.digest(salted, b"Client Key", name)
    without_proof = f"c=biws,r={nonce}".encode()
    signed = b",".join((state.first.bare.encode(), state.challenge, without_proof))
    signature = hmac.digest(credential(state.mechanism).stored_key, signed, name)
    proof = bytes(a ^ b for a, b in zip(client_key, signature, strict=True))
    return without_proof + b",p=" + base64.b64encode(proof)


def test_nonce_that_repeats_the_clients_part_is_accepted() -> None:
    """librdkafka before 2.6.1, and so kcat of Debian 12, could not log in with SCRAM."""
    state = rfc_state()
    assert scram.verify(state, final_message(state, state.first.nonce + NONCE))


@pytest.mark.parametrize(
    "nonce",
    ["", NONCE[:-1], NONCE + "x", "x" + NONCE, NONCE + NONCE, NONCE[20:], NONCE[:20]],
)
def test_another_nonce_with_a_correct_proof_is_refused(nonce: str) -> None:
    state = rfc_state()
    with pytest.raises(ScramError, match="nonce"):
        scram.verify(state, final_message(state, nonce))


@given(st.integers(0, len(FINAL) - 1), st.integers(1, 255))
def test_changed_final_message_is_refused(position: int, change: int) -> None:
    changed = bytearray(FINAL)
    changed[position] ^= change
    with pytest.raises(ScramError):
        scram.verify(rfc_state(), bytes(changed))


@pytest.mark.parametrize(
    "token",
    [
        b"",
        b"y,,n=user,r=abc",
        b"p=tls-unique,,n=user,r=abc",
        b"n,,n=,r=abc",
        b"n,,n=us=er,r=abc",
        b"n,,n=us=2cer,r=abc",
        b"n,a=other,n=user,r=abc",
        b"n,,m=ext,n=user,r=abc",
        b"n,,n=user,r=",
        b"n,,n=user,r=a b",
        b"n,,n=us\0er,r=abc",
        b"n,,n=\xff,r=abc",
        b"n,,n=user",
        b"n,,n=" + b"x" * 9_000 + b",r=abc",
    ],
)
def test_malformed_first_message_is_refused(token: bytes) -> None:
    with pytest.raises(ScramError):
        scram.parse_first(token)


def test_escaped_names_are_read() -> None:
    first_message = scram.parse_first(b"n,a=a=2Cb=3Dc,n=a=2Cb=3Dc,r=abc,tokenauth=true")
    assert first_message.user == "a,b=c"
    assert first_message.bare == "n=a=2Cb=3Dc,r=abc,tokenauth=true"


@pytest.mark.parametrize("mechanism", scram.HASHES)
def test_credential_is_stored_without_the_password(mechanism: str) -> None:
    entry = credential(mechanism)
    text = scram.format_credential(entry)
    assert scram.parse_credential(text) == entry
    assert PASSWORD not in text and "stored_key" not in repr(entry)


def test_made_up_credential_is_always_the_same_for_a_name() -> None:
    secret = b"s" * 32
    form = scram.CredentialForm("SCRAM-SHA-256", 4_096)
    first = scram.mock_credential(secret, "nobody", form)
    assert first == scram.mock_credential(secret, "nobody", form)
    other = scram.mock_credential(secret, "other", form)
    assert first.salt != other.salt
    assert scram.CredentialForm.of("SCRAM-SHA-256", first) == form


def test_added_credential_form_moves_names_only_to_itself() -> None:
    forms = [
        scram.CredentialForm("SCRAM-SHA-256", 4_096 + number) for number in range(4)
    ]
    names = [f"n{number}" for number in range(400)]
    before = [scram.chosen_form(b"s", name, forms[:3]) for name in names]
    after = [scram.chosen_form(b"s", name, forms) for name in names]
    assert set(before) == set(forms[:3]) and set(after) == set(forms)
    assert all(new in (old, forms[3]) for old, new in zip(before, after, strict=True))
