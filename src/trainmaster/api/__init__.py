"""Answer shapes: every JSON answer of the API, once, as a frozen dataclass.

`pages` fills these shapes from rows, `web` serves them and derives the OpenAPI document from them, `client` decodes
them, `cli` and `report` print them. They hold plain data and know nothing of HTML, SQL or HTTP. `codec.py` converts
them to JSON and back.

A word (status, stage, reason, role) that a newer server sends and this version does not know stays text.
"""
