"""What the server says about itself: alive, ready, version, plan, metrics, models."""

from __future__ import annotations

from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import metainfer
from metainfer.core.errors import RequestError
from metainfer.server.service import Service


async def health(_: Request, service: Service) -> Response:
    """200 while the engine is alive, also while it warms up or drains."""
    if service.client.stats().alive:
        return JSONResponse({"status": "alive"})
    raise RequestError("the engine has stopped", code="engine_dead", status=503)


async def ready(_: Request, service: Service) -> Response:
    """200 while requests are taken and computed."""
    stats = service.client.stats()
    if service.ready and stats.alive and stats.ready:
        return JSONResponse({"status": "ready"})
    raise RequestError("the server is not ready", code="not_ready", status=503)


async def version(_: Request, service: Service) -> Response:
    return JSONResponse({"version": metainfer.__version__})


async def plan(_: Request, service: Service) -> Response:
    """The plan that the engine runs by: each value with its origin and reason."""
    if service.plan is None:
        raise RequestError("this server has no plan", code="not_found", status=404)
    return Response(service.plan.to_json(), media_type="application/json")


async def metrics(_: Request, service: Service) -> Response:
    return Response(service.metrics.page(), media_type=CONTENT_TYPE_LATEST)


async def models(_: Request, service: Service) -> Response:
    data = [model_record(name, service) for name in service.model_names]
    return JSONResponse({"object": "list", "data": data})


async def model(request: Request, service: Service) -> Response:
    name = request.path_params["name"]
    service.check_model(name)
    return JSONResponse(model_record(name, service))


def model_record(name: str, service: Service) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.started_at,
        "owned_by": "metainfer",
        "root": service.arch.name,
        "parent": None,
        "max_model_len": service.max_model_len,
    }
