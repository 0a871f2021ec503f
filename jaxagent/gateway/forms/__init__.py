"""The dialects of HTTP that agent programs speak, one module each: a body -> an `Ask`, an `Answer` -> bytes.

`parse(raw)` reads a body; `body(ask, *answers, ident)` is the whole answer, `writer(ask, ident)` an `EventWriter` that
gives it piece by piece, and `error(message, status, param, code)` an error as the dialect's clients read it.
"""
