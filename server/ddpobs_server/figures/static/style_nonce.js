// BokehJS creates style elements. The security policy allows them by the nonce of this script, which each response
// renews.
{
  const { nonce } = document.currentScript,
    create = document.createElement;
  document.createElement = function (...names) {
    const created = create.apply(this, names);
    if (created.localName === "style") created.nonce = nonce;
    return created;
  };
}
