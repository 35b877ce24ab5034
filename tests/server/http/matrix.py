"""Who may call what: every route, written by hand from docs/access.md ("Who may do what") and SECURITY.md.

Nothing here is taken from the route table: whoever adds a route or changes a right adds or changes a line here.

    nobody     no token, and every token that is unknown, revoked or has expired
    device     the session of an enrolled device; `member`: only in a round that it is a participant of
    operator, analyst, auditor, admin    an access token for all populations
    elsewhere  a token of a role that may call it, that is bound to another population, with
               what belongs to this one: `yes` where nothing belongs to a population, `none` where the answer is a
               list that leaves out what is of this population, `-` where it is refused (403), `hidden` where it is
               answered as if it were not there (404; 422 where the body names it)
"""

from __future__ import annotations

from typing import NamedTuple

LINES = """
                                                                    nobody device oper.  anal.  audit. admin  elsewhere
GET  /                                                              yes    yes    yes    yes    yes    yes    yes
GET  /api/                                                          yes    yes    yes    yes    yes    yes    yes
GET  /demo/                                                         yes    yes    yes    yes    yes    yes    yes
GET  /demo/<path:name>                                              yes    yes    yes    yes    yes    yes    yes
GET  /docs/                                                         yes    yes    yes    yes    yes    yes    yes
GET  /docs/<path:name>                                              yes    yes    yes    yes    yes    yes    yes
GET  /healthz                                                       yes    yes    yes    yes    yes    yes    yes
GET  /readyz                                                        yes    yes    yes    yes    yes    yes    yes
GET  /v1/health                                                     yes    yes    yes    yes    yes    yes    yes
GET  /v1/server                                                     yes    yes    yes    yes    yes    yes    yes
GET  /v1/openapi.json                                               yes    yes    yes    yes    yes    yes    yes

POST /v1/devices                                                    yes    yes    yes    yes    yes    yes    yes
PUT  /v1/devices/<id:device_id>/key                                 yes    yes    yes    yes    yes    yes    yes
POST /v1/challenges                                                 yes    yes    yes    yes    yes    yes    yes
POST /v1/sessions                                                   yes    yes    yes    yes    yes    yes    yes
POST /v1/check-ins                                                  -      yes    -      -      -      -      -

GET  /v1/rounds/<id:round_id>                                       -      member yes    yes    yes    yes    hidden
GET  /v1/rounds/<id:round_id>/task                                    -      member -      -      -      -      -
POST /v1/rounds/<id:round_id>/leave                                 -      member -      -      -      -      -
PUT  /v1/rounds/<id:round_id>/advertisement                         -      member -      -      -      -      -
GET  /v1/rounds/<id:round_id>/cohort                                -      member -      -      -      -      -
PUT  /v1/rounds/<id:round_id>/shares                                -      member -      -      -      -      -
GET  /v1/rounds/<id:round_id>/shares                                -      member -      -      -      -      -
PUT  /v1/rounds/<id:round_id>/complaints                            -      member -      -      -      -      -
GET  /v1/rounds/<id:round_id>/complaints                            -      member -      -      -      -      -
PUT  /v1/rounds/<id:round_id>/update                                -      member -      -      -      -      -
GET  /v1/rounds/<id:round_id>/update/parts                          -      member -      -      -      -      -
PUT  /v1/rounds/<id:round_id>/update/parts/<number:number>          -      member -      -      -      -      -
GET  /v1/rounds/<id:round_id>/survivors                             -      member -      -      -      -      -
PUT  /v1/rounds/<id:round_id>/confirmation                          -      member -      -      -      -      -
GET  /v1/rounds/<id:round_id>/confirmations                         -      member -      -      -      -      -
PUT  /v1/rounds/<id:round_id>/unmasking                             -      member -      -      -      -      -
PUT  /v1/rounds/<id:round_id>/member                                -      member -      -      -      -      -
GET  /v1/rounds/<id:round_id>/invitation                            -      member -      -      -      -      -
POST /v1/rounds/<id:round_id>/neighbours                            -      member -      -      -      -      -
PUT  /v1/rounds/<id:round_id>/dealt                                 -      member -      -      -      -      -
GET  /v1/rounds/<id:round_id>/inbox                                 -      member -      -      -      -      -
PUT  /v1/rounds/<id:round_id>/refused                               -      member -      -      -      -      -
GET  /v1/rounds/<id:round_id>/partners                              -      member -      -      -      -      -
GET  /v1/rounds/<id:round_id>/question                              -      member -      -      -      -      -
PUT  /v1/rounds/<id:round_id>/inclusions                            -      member -      -      -      -      -
GET  /v1/rounds/<id:round_id>/inclusions                            -      member -      -      -      -      -
PUT  /v1/rounds/<id:round_id>/answer                                -      member -      -      -      -      -
GET  /v1/rounds/<id:round_id>/log                                     -      -      -      -      -      yes    -
GET  /v1/rounds/<id:round_id>/participants                          -      -      yes    yes    yes    yes    hidden

POST /v1/bundles                                                    -      -      yes    -      -      yes    yes
GET  /v1/bundles                                                    -      -      yes    yes    yes    yes    none
GET  /v1/bundles/<digest:digest>                                    -      yes    yes    yes    yes    yes    hidden
GET  /v1/bundles/<digest:digest>/pieces                             -      yes    yes    yes    yes    yes    hidden
GET  /v1/blobs/<digest:digest>                                      -      yes    yes    yes    yes    yes    hidden
GET  /v1/blobs/<digest:digest>/pieces                               -      yes    yes    yes    yes    yes    hidden

GET  /v1/devices                                                    -      -      yes    yes    yes    yes    none
GET  /v1/devices/<id:device_id>                                     -      -      yes    yes    yes    yes    hidden
POST /v1/devices/<id:device_id>/revoke                              -      -      yes    -      -      yes    hidden
POST /v1/devices/<id:device_id>/release                             -      -      yes    -      -      yes    hidden
POST /v1/enrolment-tokens/revoke                                    -      -      yes    -      -      yes    -
GET  /v1/enrolment-tokens/revoked                                   -      -      yes    yes    yes    yes    none
GET  /v1/populations                                                -      -      yes    yes    yes    yes    none
GET  /v1/populations/<name:name>                                    -      -      yes    yes    yes    yes    -
GET  /v1/populations/<name:name>/weights-log/<digest:digest>        -      yes    yes    yes    yes    yes    -
GET /v1/populations/<name:name>/weights-log/<digest:digest>/<number:number>/endorsement - yes yes yes yes yes -

POST /v1/tasks                                                      -      -      yes    yes    -      yes    -
GET  /v1/tasks                                                      -      -      yes    yes    yes    yes    none
GET  /v1/tasks/<id:task_id>                                         -      -      yes    yes    yes    yes    hidden
GET  /v1/tasks/<id:task_id>/rounds                                  -      -      yes    yes    yes    yes    hidden
GET  /v1/tasks/<id:task_id>/metrics                                 -      -      yes    yes    yes    yes    hidden
GET  /v1/tasks/<id:task_id>/progress                                -      -      yes    yes    yes    yes    hidden
POST /v1/tasks/<id:task_id>/cancel                                  -      -      yes    yes    -      yes    hidden
POST /v1/tasks/<id:task_id>/pause                                   -      -      yes    yes    -      yes    hidden
POST /v1/tasks/<id:task_id>/resume                                  -      -      yes    yes    -      yes    hidden
POST /v1/tasks/<id:task_id>/approve                                 -      -      -      yes    -      yes    hidden

POST /v1/models                                                     -      -      yes    -      -      yes    -
GET  /v1/models                                                     -      -      yes    yes    yes    yes    none
GET  /v1/models/<name:name>                                         -      -      yes    yes    yes    yes    hidden
POST /v1/models/<name:name>/retention                               -      -      yes    -      -      yes    hidden
POST /v1/models/<name:name>/versions                                -      -      yes    -      -      yes    hidden
GET  /v1/models/<name:name>/versions                                -      -      yes    yes    yes    yes    hidden
GET  /v1/models/<name:name>/versions/<number:number>                -      -      yes    yes    yes    yes    hidden
POST /v1/models/<name:name>/versions/<number:number>/reject         -      -      yes    -      -      yes    hidden
POST /v1/models/<name:name>/versions/<number:number>/restore        -      -      yes    -      -      yes    hidden
POST /v1/models/<name:name>/promote                                 -      -      yes    -      -      yes    hidden
POST /v1/models/<name:name>/rollback                                -      -      yes    -      -      yes    hidden
GET  /v1/models/<name:name>/promotions                              -      -      yes    yes    yes    yes    hidden

POST /v1/rollouts                                                   -      -      yes    -      -      yes    hidden
GET  /v1/rollouts                                                   -      -      yes    yes    yes    yes    none
GET  /v1/rollouts/<id:rollout_id>                                   -      -      yes    yes    yes    yes    hidden
POST /v1/rollouts/<id:rollout_id>/pause                             -      -      yes    -      -      yes    hidden
POST /v1/rollouts/<id:rollout_id>/resume                            -      -      yes    -      -      yes    hidden
POST /v1/rollouts/<id:rollout_id>/abort                             -      -      yes    -      -      yes    hidden

POST /v1/tokens                                                     -      -      -      -      -      yes    -
GET  /v1/tokens                                                     -      -      -      -      -      yes    -
POST /v1/tokens/<id:token_id>/revoke                                -      -      -      -      -      yes    -
GET  /v1/audit                                                      -      -      -      -      yes    yes    -
GET  /v1/audit/head                                                 -      -      -      -      yes    yes    -
"""


class Line(NamedTuple):
    method: str
    path: str
    nobody: str
    device: str
    operator: str
    analyst: str
    auditor: str
    admin: str
    elsewhere: str

    @property
    def route(self) -> str:
        return f"{self.method} {self.path}"


MATRIX = [Line(*line.split()) for line in LINES.strip().splitlines()[1:] if line]
