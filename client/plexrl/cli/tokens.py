"""`plexrl tokens create`, `list` and `revoke`: access for people, jobs and workers."""

import argparse

from rich.console import Console

from plexrl.cli import options
from plexrl.v1 import admin_pb2 as a

ROLES = {
    "admin": a.ROLE_ADMIN,
    "tenant": a.ROLE_TENANT,
    "viewer": a.ROLE_VIEWER,
    "worker": a.ROLE_WORKER,
}


def add_parser(subparsers: options.Subparsers) -> None:
    """Adds `tokens` to the subcommands."""
    parser = subparsers.add_parser(
        "tokens", help="create, list and revoke access tokens", description="Create, list and revoke access tokens."
    )
    parser.set_defaults(run=run)
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action", required=True)
    create = actions.add_parser("create", help="create a token; its text is shown once")
    create.add_argument("label", help="says whose it is, unique among tokens that are not revoked")
    create.add_argument("--role", choices=tuple(ROLES), default="tenant", help="what it may do (default tenant)")
    create.add_argument("--tenant", default="", help="whose jobs it reaches; required for role tenant")
    options.add_json_argument(create)
    options.add_connection_arguments(create)
    listed = actions.add_parser("list", help="list the tokens that are not revoked, without their texts")
    options.add_json_argument(listed)
    options.add_connection_arguments(listed)
    revoke = actions.add_parser("revoke", help="revoke a token")
    revoke.add_argument("token_id", metavar="TOKEN_ID", help="its id, as `create` printed it and `list` shows it")
    options.add_connection_arguments(revoke)


def run(args: argparse.Namespace) -> int:
    """Returns the exit status."""
    with options.connection(args) as connection:
        if args.action == "list":
            tokens = connection.unary(connection.admin.ListTokens, a.ListTokensRequest()).tokens
            if args.json:
                options.show_json(tokens)
            else:
                rows = [
                    [t.token_id, t.label, t.tenant, options.state_name(a.Role.Name(t.role), "ROLE_")] for t in tokens
                ]
                options.show_table(("TOKEN", "LABEL", "TENANT", "ROLE"), rows, "no tokens")
            return 0
        if args.action == "revoke":
            # Not repeated when the reply is lost: the second try would say that there is no such token.
            connection.unary(
                connection.admin.RevokeToken, a.RevokeTokenRequest(token_id=args.token_id), retry_for_s=0.0
            )
            print(f"revoked {args.token_id}")
            return 0
        request = a.CreateTokenRequest(label=args.label, tenant=args.tenant, role=ROLES[args.role])
        # Not repeated either: the label would be taken by the first try, and its token lost.
        created = connection.unary(connection.admin.CreateToken, request, retry_for_s=0.0)
    if args.json:
        options.show_json([created])
        return 0
    print(created.token)
    Console(stderr=True).print(
        f"token {created.token_id} ({args.label}): shown this once; keep it in a file of mode 0600", soft_wrap=True
    )
    return 0
