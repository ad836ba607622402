"""The queries on PostgreSQL's catalog: one statement reads all that there is in a namespace."""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import Connection, text

from awa_sqla.schema.drift import catalog as sorts
from awa_sqla.schema.drift.catalog import Catalog, key

_GRANTS = """coalesce((
    SELECT jsonb_agg(jsonb_build_array(
        a.privilege_type, CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END,
        CASE WHEN a.is_grantable THEN ' WITH GRANT OPTION' ELSE '' END
    ) ORDER BY a.privilege_type, a.grantee) FROM aclexplode({acl}) AS a WHERE a.grantee <> {owner}
), '[]')"""

_KEYS = """(
    SELECT coalesce(jsonb_agg(a.attname ORDER BY k.place), '[]')
    FROM unnest({keys}) WITH ORDINALITY AS k (number, place)
    JOIN pg_attribute AS a ON a.attrelid = {table} AND a.attnum = k.number
)"""

#: One SELECT for each sort: what `Catalog` calls it, and the fields of its class.
_SORTS = {
    "relations": """
        SELECT jsonb_build_object(
            'name', c.relname, 'kind', c.relkind, 'persistence', c.relpersistence, 'secured', c.relrowsecurity,
            'forced', c.relforcerowsecurity
        ) FROM pg_class AS c WHERE c.relnamespace = {namespace} AND c.relkind NOT IN ('i', 'I', 'S', 'c')
    """,
    "columns": """
        SELECT jsonb_build_object(
            'table', c.relname, 'name', a.attname,
            'type', format_type(a.atttypid, a.atttypmod) || CASE WHEN a.attcollation <> t.typcollation
                THEN ' COLLATE ' || a.attcollation::regcollation ELSE '' END,
            'not_null', a.attnotnull,
            'unproven', (SELECT n.conname FROM pg_constraint AS n WHERE n.conrelid = c.oid AND n.contype = 'n'
                AND n.conkey = ARRAY[a.attnum] AND NOT n.convalidated),
            'identity', a.attidentity, 'generated', a.attgenerated,
            'default', pg_get_expr(d.adbin, d.adrelid), 'sql_default', pg_get_expr(d.adbin, d.adrelid)
        ) FROM pg_class AS c JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
        JOIN pg_type AS t ON t.oid = a.atttypid
        LEFT JOIN pg_attrdef AS d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
        WHERE c.relnamespace = {namespace} AND c.relkind IN ('r', 'p') ORDER BY c.relname, a.attnum
    """,
    "constraints": """
        SELECT jsonb_build_object(
            'table', c.relname, 'name', k.conname, 'kind', k.contype, 'definition', pg_get_constraintdef(k.oid, true),
            'columns', {constraint_columns}
        ) FROM pg_constraint AS k JOIN pg_class AS c ON c.oid = k.conrelid
        WHERE c.relnamespace = {namespace} AND k.contype IN ('c', 'p', 'u', 'x', 'f')
    """,
    "indexes": """
        SELECT jsonb_build_object(
            'table', c.relname, 'name', i.relname, 'unique', x.indisunique, 'valid', x.indisvalid,
            'keys', regexp_replace(pg_get_indexdef(x.indexrelid, 0, true),
                '^.*? USING (.*?)( WITH [(][^)]*[)])?( WHERE .*)?$', '\\1'),
            'predicate', pg_get_expr(x.indpred, x.indrelid, true), 'plain', x.indexprs IS NULL,
            'distinct_nulls', pg_get_indexdef(x.indexrelid) !~ ' NULLS NOT DISTINCT',
            'sql', pg_get_indexdef(x.indexrelid), 'columns', {index_columns}
        ) FROM pg_index AS x JOIN pg_class AS i ON i.oid = x.indexrelid JOIN pg_class AS c ON c.oid = x.indrelid
        WHERE c.relnamespace = {namespace} AND c.relkind IN ('r', 'p')
        AND NOT EXISTS (SELECT FROM pg_constraint AS k WHERE k.conindid = x.indexrelid AND k.contype IN ('p', 'u', 'x'))
    """,
    "sequences": """
        SELECT jsonb_build_object(
            'name', c.relname, 'persistence', c.relpersistence, 'type', format_type(s.seqtypid, NULL),
            'start', s.seqstart, 'increment', s.seqincrement, 'minimum', s.seqmin, 'maximum', s.seqmax,
            'cycle', s.seqcycle, 'owner', t.relname || '.' || a.attname, 'bound', d.deptype
        ) FROM pg_class AS c JOIN pg_sequence AS s ON s.seqrelid = c.oid
        LEFT JOIN pg_depend AS d ON d.classid = 'pg_class'::regclass AND d.objid = c.oid
            AND d.refclassid = 'pg_class'::regclass AND d.deptype IN ('a', 'i')
        LEFT JOIN pg_class AS t ON t.oid = d.refobjid
        LEFT JOIN pg_attribute AS a ON a.attrelid = d.refobjid AND a.attnum = d.refobjsubid
        WHERE c.relnamespace = {namespace}
    """,
    "views": """
        SELECT jsonb_build_object(
            'name', c.relname, 'definition', rtrim(pg_get_viewdef(c.oid), ';'),
            'sql', rtrim(pg_get_viewdef(c.oid), ';'),
            'columns', (SELECT jsonb_agg(a.attname || ' ' || format_type(a.atttypid, a.atttypmod) ORDER BY a.attnum)
                FROM pg_attribute AS a WHERE a.attrelid = c.oid AND a.attnum > 0),
            'options', coalesce(to_jsonb(c.reloptions), '[]'),
            'owner', quote_ident(pg_get_userbyid(c.relowner)), 'grants', {view_grants}
        ) FROM pg_class AS c WHERE c.relnamespace = {namespace} AND c.relkind = 'v'
    """,
    "functions": """
        SELECT jsonb_build_object(
            'signature', p.proname || '(' || oidvectortypes(p.proargtypes) || ')',
            'arguments', pg_get_function_arguments(p.oid), 'result', pg_get_function_result(p.oid),
            'attributes', concat_ws(' ', l.lanname, p.prokind, p.provolatile, p.proparallel, p.proisstrict,
                p.proleakproof, p.procost, p.prorows),
            'security_definer', p.prosecdef, 'settings', coalesce(to_jsonb(p.proconfig), '[]'), 'source', p.prosrc,
            'revoked', p.proacl IS NOT NULL AND NOT EXISTS (SELECT FROM aclexplode(p.proacl) AS a WHERE a.grantee = 0),
            'sql', pg_get_functiondef(p.oid),
            'owner', quote_ident(pg_get_userbyid(p.proowner)), 'grants', {function_grants}
        ) FROM pg_proc AS p JOIN pg_language AS l ON l.oid = p.prolang
        WHERE p.pronamespace = {namespace} AND p.prokind IN ('f', 'p')
    """,
    "triggers": """
        SELECT jsonb_build_object(
            'table', c.relname, 'name', g.tgname, 'definition', pg_get_triggerdef(g.oid, true), 'enabled', g.tgenabled,
            'columnar', g.tgattr::text <> '' OR g.tgqual IS NOT NULL, 'sql', pg_get_triggerdef(g.oid)
        ) FROM pg_trigger AS g JOIN pg_class AS c ON c.oid = g.tgrelid
        WHERE c.relnamespace = {namespace} AND NOT g.tgisinternal
    """,
    "rules": """
        SELECT jsonb_build_object('table', c.relname, 'name', r.rulename)
        FROM pg_rewrite AS r JOIN pg_class AS c ON c.oid = r.ev_class
        WHERE c.relnamespace = {namespace} AND c.relkind IN ('r', 'p')
    """,
    "references": """
        SELECT jsonb_build_object(
            'table', c.relname, 'name', k.conname,
            'source', s.relnamespace::regnamespace || '.' || quote_ident(s.relname),
            'within', CASE s.relnamespace WHEN c.relnamespace THEN s.relname END
        ) FROM pg_constraint AS k JOIN pg_class AS c ON c.oid = k.confrelid JOIN pg_class AS s ON s.oid = k.conrelid
        WHERE c.relnamespace = {namespace} AND k.contype = 'f' AND k.conparentid = 0
    """,
}

_CLASSES: dict[str, type[Any]] = {
    "relations": sorts.Relation,
    "columns": sorts.Column,
    "constraints": sorts.Constraint,
    "indexes": sorts.Index,
    "sequences": sorts.Sequence,
    "views": sorts.View,
    "functions": sorts.Function,
    "triggers": sorts.Trigger,
    "rules": sorts.Rule,
    "references": sorts.Reference,
}

#: What stands in several of them.
_PARTS = {
    "{constraint_columns}": _KEYS.format(keys="k.conkey", table="c.oid"),
    "{index_columns}": _KEYS.format(keys="x.indkey::int2[]", table="c.oid"),
    "{view_grants}": _GRANTS.format(acl="c.relacl", owner="c.relowner"),
    "{function_grants}": _GRANTS.format(acl="p.proacl", owner="p.proowner"),
}

_TEMPLATE = "\nUNION ALL\n".join(
    f"SELECT '{sort}' AS sort, {sort}_found.one::text FROM ({query}) AS {sort}_found (one)"  # noqa: S608 - constants
    for sort, query in _SORTS.items()
)


def read(connection: Connection, namespace: int) -> Catalog:
    """All of a namespace, given as its oid; the names in definitions are as the search_path makes them."""
    query = _TEMPLATE
    for name, part in {**_PARTS, "{namespace}": str(namespace)}.items():
        query = query.replace(name, part)
    catalog = Catalog()
    for sort, body in connection.execute(text(query)):
        one = _CLASSES[sort](**json.loads(body))
        getattr(catalog, sort)[key(one)] = one
    return catalog
