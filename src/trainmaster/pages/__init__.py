"""Pages: one file each, a query that fills an answer shape of `api`.

Every module has `read(db, …)`, which returns the shape. It knows nothing of HTML: the web, the reports and the command
line render the same shape. Parts that several pages share are in `parts/`.
"""
