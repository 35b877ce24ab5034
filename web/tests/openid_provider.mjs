// A certified OpenID provider (panva's oidc-provider) with a few people, whose password is not asked for, for tests:
// node openid_provider.mjs PORT REDIRECT_URI SECRET '{"PERSON": ["GROUP"]}'
import Provider from "oidc-provider";

const [port, redirect, secret, people] = process.argv.slice(2);
const groups = JSON.parse(people);
const provider = new Provider(`http://127.0.0.1:${port}`, {
  clients: [{ client_id: "archipel", client_secret: secret, redirect_uris: [redirect] }],
  claims: { openid: ["sub", "groups"], profile: ["name"] },
  conformIdTokenClaims: false,
  pkce: { required: () => true },
  findAccount: (_, id) => ({ accountId: id, claims: () => ({ sub: id, groups: groups[id] ?? [], name: id }) }),
});
provider.listen(Number(port), "127.0.0.1", () => console.log("listening"));
