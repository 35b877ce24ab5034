"""Who sees which page of the dashboard and may send which form, written by hand from docs/dashboard.md.

Nothing here is taken from the table of pages: whoever adds a page or changes a right adds or changes a line here.

    nobody     no cookie, and one of a session that has ended: `login` where the answer is the way to the login
    operator, analyst, auditor, admin    a session of an access token for all populations
"""

from __future__ import annotations

from typing import NamedTuple

LINES = """
                                                                              nobody oper. anal. audit. admin
GET  /dashboard/login                                                         yes    yes   yes   yes    yes
POST /dashboard/login                                                         yes    yes   yes   yes    yes
GET  /dashboard/static/<path:name>                                            yes    yes   yes   yes    yes
POST /dashboard/logout                                                        -      yes   yes   yes    yes
GET  /dashboard/                                                              login  yes   yes   yes    yes
GET  /dashboard/tasks                                                         login  yes   yes   yes    yes
GET  /dashboard/tasks/<id:task_id>                                            login  yes   yes   yes    yes
GET  /dashboard/tasks/<id:task_id>/events                                     login  yes   yes   yes    yes
GET  /dashboard/tasks/<id:task_id>/approve                                    login  -     yes   -      yes
POST /dashboard/tasks/<id:task_id>/approve                                    -      -     yes   -      yes
GET  /dashboard/tasks/<id:task_id>/pause                                      login  yes   yes   -      yes
POST /dashboard/tasks/<id:task_id>/pause                                      -      yes   yes   -      yes
GET  /dashboard/tasks/<id:task_id>/resume                                     login  yes   yes   -      yes
POST /dashboard/tasks/<id:task_id>/resume                                     -      yes   yes   -      yes
GET  /dashboard/tasks/<id:task_id>/cancel                                     login  yes   yes   -      yes
POST /dashboard/tasks/<id:task_id>/cancel                                     -      yes   yes   -      yes
GET  /dashboard/tasks/new                                                     login  yes   yes   -      yes
POST /dashboard/tasks/new                                                     -      yes   yes   -      yes
GET  /dashboard/rounds/<id:round_id>                                          login  yes   yes   yes    yes
GET  /dashboard/populations                                                   login  yes   yes   yes    yes
GET  /dashboard/populations/<name:name>                                       login  yes   yes   yes    yes
GET  /dashboard/devices                                                       login  yes   yes   yes    yes
GET  /dashboard/devices/<id:device_id>                                        login  yes   yes   yes    yes
GET  /dashboard/models                                                        login  yes   yes   yes    yes
GET  /dashboard/models/<name:name>                                            login  yes   yes   yes    yes
GET  /dashboard/models/<name:name>/compare                                    login  yes   yes   yes    yes
GET  /dashboard/models/<name:name>/versions/<number:number>                   login  yes   yes   yes    yes
GET  /dashboard/models/<name:name>/versions/<number:number>/insight            login  yes   yes   yes    yes
GET  /dashboard/tasks/<id:task_id>/insight                                     login  yes   yes   yes    yes
GET  /dashboard/insight/bundles/<digest:digest>                                login  yes   yes   yes    yes
GET  /dashboard/insight/bundles/<digest:digest>/weights                        login  yes   yes   yes    yes
GET  /dashboard/insight/weights/<digest:digest>                                login  yes   yes   yes    yes
GET  /dashboard/bundles                                                       login  yes   yes   yes    yes
GET  /dashboard/bundles/<digest:digest>                                       login  yes   yes   yes    yes
GET  /dashboard/bundles/upload                                                login  yes   -     -      yes
POST /dashboard/bundles/upload                                                -      yes   -     -      yes
GET  /dashboard/rollouts                                                      login  yes   yes   yes    yes
GET  /dashboard/rollouts/<id:rollout_id>                                      login  yes   yes   yes    yes
GET  /dashboard/audit                                                         login  -     -     yes    yes
GET  /dashboard/new-model                                                     login  yes   -     -      yes
POST /dashboard/new-model                                                     -      yes   -     -      yes
GET  /dashboard/models/<name:name>/register                                   login  yes   -     -      yes
POST /dashboard/models/<name:name>/register                                   -      yes   -     -      yes
GET  /dashboard/models/<name:name>/versions/<number:number>/rollout           login  yes   -     -      yes
POST /dashboard/models/<name:name>/versions/<number:number>/rollout           -      yes   -     -      yes
GET  /dashboard/devices/<id:device_id>/release                                login  yes   -     -      yes
POST /dashboard/devices/<id:device_id>/release                                -      yes   -     -      yes
GET  /dashboard/devices/<id:device_id>/revoke                                 login  yes   -     -      yes
POST /dashboard/devices/<id:device_id>/revoke                                 -      yes   -     -      yes
GET  /dashboard/models/<name:name>/rollback                                   login  yes   -     -      yes
POST /dashboard/models/<name:name>/rollback                                   -      yes   -     -      yes
GET  /dashboard/models/<name:name>/versions/<number:number>/promote           login  yes   -     -      yes
POST /dashboard/models/<name:name>/versions/<number:number>/promote           -      yes   -     -      yes
GET  /dashboard/models/<name:name>/versions/<number:number>/reject            login  yes   -     -      yes
POST /dashboard/models/<name:name>/versions/<number:number>/reject            -      yes   -     -      yes
GET  /dashboard/models/<name:name>/versions/<number:number>/restore           login  yes   -     -      yes
POST /dashboard/models/<name:name>/versions/<number:number>/restore           -      yes   -     -      yes
GET  /dashboard/rollouts/<id:rollout_id>/pause                                login  yes   -     -      yes
POST /dashboard/rollouts/<id:rollout_id>/pause                                -      yes   -     -      yes
GET  /dashboard/rollouts/<id:rollout_id>/resume                               login  yes   -     -      yes
POST /dashboard/rollouts/<id:rollout_id>/resume                               -      yes   -     -      yes
GET  /dashboard/rollouts/<id:rollout_id>/abort                                login  yes   -     -      yes
POST /dashboard/rollouts/<id:rollout_id>/abort                                -      yes   -     -      yes
"""


class Line(NamedTuple):
    method: str
    path: str
    nobody: str
    operator: str
    analyst: str
    auditor: str
    admin: str

    @property
    def route(self) -> str:
        return f"{self.method} {self.path}"


MATRIX = [Line(*line.split()) for line in LINES.strip().splitlines()[1:] if line]
