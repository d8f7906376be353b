"""Private interfaces of wandb_workspaces: find views by name, and serialize a workspace without saving it.

Tested with wandb 0.31 and wandb_workspaces 0.4.13. Raises ImportError or AttributeError if the interfaces differ.
"""

from __future__ import annotations

from typing import Any


def app_url(api: Any) -> str:
    """Return the URL of the server's pages for a `wandb.Api`: `get_app_url` in wandb_workspaces._graphql."""
    from wandb_workspaces._graphql import get_app_url

    return str(get_app_url(api)).rstrip("/")


def find_view(api: Any, entity: str, project: str, kind: str, name: str) -> dict[str, str] | None:
    """Return `id` and `name` of the project's view of this kind and name; None if there is none.

    wandb_workspaces finds workspaces ("project-view") and reports ("runs") by address only, so this queries the server
    with `execute_graphql` in wandb_workspaces._graphql.
    """
    from wandb_workspaces._graphql import execute_graphql

    query = """query Views($project: String!, $entity: String!, $kind: String!) {
        project(name: $project, entityName: $entity) {
            allViews(viewType: $kind) { edges { node { id name displayName } } }
        }
    }"""
    found = execute_graphql(api, query, {"project": project, "entity": entity, "kind": kind})
    edges = ((found.get("project") or {}).get("allViews") or {}).get("edges", [])
    return next((edge["node"] for edge in edges if edge["node"]["displayName"] == name), None)


def workspace_json(workspace: Any) -> str:
    """Return the request of saving a `wandb_workspaces.workspaces.Workspace`: its `_to_model`."""
    return str(workspace._to_model().model_dump_json(by_alias=True, exclude_none=True))
