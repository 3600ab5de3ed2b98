#!/usr/bin/env bash
# What becomes of 64-bit hashed ids, of which half are 2^63 or more, when a CSV file is read or written on as Parquet.
#
# Seen with pandas 3.1.1, pyarrow 26.0.1, polars 2.1.0 and duckdb 2.0.1. Expected from memory: pandas uint64; pyarrow rounds to double;
# polars an error or double; DuckDB keeps them exactly, also in Parquet and in pandas. In fact:
#   - pandas has uint64, but texts (`str`) if one field is empty or one id is negative;
#   - pyarrow has double: neighbouring ids become one id;
#   - DuckDB has int128, and that becomes double without a word in `COPY ... TO 'x.parquet'`, `.df()` and `.fetchnumpy()`;
#   - polars has i128: its `to_numpy()` and `to_arrow()` refuse it, pyarrow refuses its Parquet file, DuckDB reads that as bytes.
# What this means for us: a reader of sparse data takes ids as u64 (or hashes their texts), and refuses a column of floating point
# numbers as ids, naming the column and the remedy (`CAST(id AS UBIGINT)`, `schema_overrides={"id": pl.UInt64}`).
#
#   findings/hashed-ids-from-csv.sh
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check pandas==3.1.1 pyarrow==26.0.1 polars==2.1.0 duckdb==2.0.1
cd "$folder"
cat >ids.py <<'PY'
import duckdb
import pandas
import polars
import pyarrow.csv
import pyarrow.parquet

IDS = [17, 2**63 + 1, 2**63 + 2, 2**64 - 59]


def write(name, ids):
    with open(name, "w") as out:
        out.write("id,label\n" + "".join(f"{i},1\n" for i in ids))


def kept(ids):
    """How many different ids there still are, of four."""
    return len(set(map(int, ids)))


def refused(f):
    try:
        return repr(f())
    except Exception as e:
        return type(e).__name__


write("ids.csv", IDS)
write("empty.csv", [*IDS, ""])
write("negative.csv", [*IDS, -1])
select = duckdb.sql("SELECT id FROM 'ids.csv'")
duckdb.sql("COPY (SELECT id FROM 'ids.csv') TO 'duckdb.parquet'")
duckdb.sql("COPY (SELECT CAST(id AS UBIGINT) AS id FROM 'ids.csv') TO 'cast.parquet'")
frame = polars.read_csv("ids.csv")
frame.write_parquet("polars.parquet")
arrow, copied = pyarrow.csv.read_csv("ids.csv")["id"], pyarrow.parquet.read_table("duckdb.parquet")["id"]
cast = pyarrow.parquet.read_table("cast.parquet")["id"]
seen = {
    "pandas": str(pandas.read_csv("ids.csv")["id"].dtype),
    "pandas, one empty": str(pandas.read_csv("empty.csv")["id"].dtype),
    "pandas, one negative": str(pandas.read_csv("negative.csv")["id"].dtype),
    "pyarrow": f"{arrow.type}, {kept(arrow.to_pylist())} of 4",
    "duckdb": f"{select.types[0]}, {kept(i for (i,) in select.fetchall())} of 4",
    "duckdb .df()": f"{select.df()['id'].dtype}, {kept(select.df()['id'])} of 4",
    "duckdb .fetchnumpy()": str(select.fetchnumpy()["id"].dtype),
    "duckdb to parquet": f"{copied.type}, {kept(copied.to_pylist())} of 4",
    "duckdb to parquet, cast": f"{cast.type}, {kept(cast.to_pylist())} of 4",
    "polars": f"{frame['id'].dtype}, {kept(frame['id'])} of 4",
    "polars .to_numpy()": refused(lambda: frame["id"].to_numpy()),
    "polars .to_arrow()": refused(frame.to_arrow),
    "polars to parquet to pyarrow": refused(lambda: pyarrow.parquet.read_table("polars.parquet")),
    "polars to parquet to duckdb": str(duckdb.sql("SELECT id FROM 'polars.parquet'").types[0]),
}
for name, what in seen.items():
    print(f"{name:30} {what}")
said = "uint64|str|str|double, 3 of 4|HUGEINT, 4 of 4|float64, 3 of 4|float64|double, 3 of 4|uint64, 4 of 4|Int128, 4 of 4"
said += "|InvalidOperationError|ArrowInvalid|ArrowNotImplementedError|BLOB"
assert list(seen.values()) == said.split("|"), "it has changed"
PY
venv/bin/python ids.py
