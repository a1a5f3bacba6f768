-- The role and the database of a PlexRL controller. Run as a superuser, as often as you like:
--   { echo "\set password $(cat /etc/plexrl/database-password)"; cat deploy/postgres/role.sql; } | su postgres -c psql
-- so that the password stands on no command line.
\set ON_ERROR_STOP on

SELECT 'CREATE ROLE plexrl LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE NOREPLICATION'
WHERE NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'plexrl')
\gexec

ALTER ROLE plexrl PASSWORD :'password';

-- The migrations create the tables, so the role owns its database.
SELECT 'CREATE DATABASE plexrl OWNER plexrl ENCODING ''UTF8'' LOCALE ''C'' TEMPLATE template0'
WHERE NOT EXISTS (SELECT FROM pg_database WHERE datname = 'plexrl')
\gexec

REVOKE ALL ON DATABASE plexrl FROM PUBLIC;
GRANT CONNECT, TEMPORARY ON DATABASE plexrl TO plexrl;

-- A call that is acknowledged is on disk; a lost session does not hold its locks for long.
ALTER ROLE plexrl IN DATABASE plexrl SET synchronous_commit = 'on';
ALTER ROLE plexrl IN DATABASE plexrl SET idle_in_transaction_session_timeout = '60s';
ALTER ROLE plexrl IN DATABASE plexrl SET statement_timeout = '60s';
