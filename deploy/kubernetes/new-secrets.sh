#!/bin/sh
# Draws passwords and tokens (components/secrets) and a CA with one certificate (components/certificate).
# What is already there is kept. API_KEY: the key of clients; drawn when unset.
set -eu
umask 077
cd "$(dirname "$0")/components"
draw() { openssl rand -hex 24; }

for name in nats-password valkey-password service-token; do
    [ -e "secrets/$name" ] || printf %s "$(draw)" > "secrets/$name"
done
[ -e secrets/api-keys ] || printf %s "${API_KEY:-$(draw)}" > secrets/api-keys

if [ ! -e certificate/tls.crt ]; then
    cd certificate
    new_key() { openssl ecparam -name prime256v1 -genkey -noout | openssl pkcs8 -topk8 -nocrypt -out "$1"; }
    new_key ca.key
    openssl req -new -x509 -sha256 -days 3650 -key ca.key -subj /CN=shoal-ca -out ca.crt \
        -addext keyUsage=critical,keyCertSign,cRLSign
    new_key tls.key
    openssl req -new -sha256 -key tls.key -subj /CN=shoal.internal -out tls.csr
    printf '%s\n' 'subjectAltName=DNS:shoal.internal,DNS:shoal-nats,DNS:shoal-valkey,DNS:shoal-gateway' \
        'extendedKeyUsage=serverAuth,clientAuth' > tls.ext
    openssl x509 -req -sha256 -days 365 -in tls.csr -CA ca.crt -CAkey ca.key -CAcreateserial -extfile tls.ext \
        -out tls.crt 2> /dev/null
    rm -f tls.csr tls.ext ca.srl
fi
