#!/usr/bin/env bash
# Makes a private authority and certificates for PlexRL, where there is no authority to use already.
#   issue.sh FOLDER NAME HOST [HOST…]    NAME is the file's name: controller, or worker; HOST a DNS name or an IP address
# The authority is made the first time: FOLDER/ca.pem goes to every machine, FOLDER/ca.key to none of them.
set -euo pipefail
if [ $# -lt 3 ]; then
  sed -n '2,4s/^# //p' "$0" >&2
  exit 2
fi
folder=$1 name=$2
shift 2
umask 077
mkdir -p "$folder"
cd "$folder"

if [ ! -e ca.key ]; then
  openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -noenc -keyout ca.key -out ca.pem -days 3650 \
    -subj "/CN=PlexRL authority" -addext "basicConstraints=critical,CA:TRUE" -addext "keyUsage=critical,keyCertSign" \
    2> /dev/null
fi

names=""
for host in "$@"; do
  if [[ $host =~ ^[0-9.]+$ || $host == *:* ]]; then names+="IP:$host,"; else names+="DNS:$host,"; fi
done
extensions=$(mktemp)
trap 'rm -f "$extensions" "$name.csr"' EXIT
# Both sides of mutual TLS use one certificate: the controller calls workers, and workers call the controller.
cat > "$extensions" << EOF
subjectAltName=${names%,}
extendedKeyUsage=serverAuth,clientAuth
keyUsage=digitalSignature
basicConstraints=CA:FALSE
EOF
openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -noenc -keyout "$name.key" -out "$name.csr" -subj "/CN=$1" \
  2> /dev/null
openssl x509 -req -in "$name.csr" -CA ca.pem -CAkey ca.key -CAcreateserial -days 825 -extfile "$extensions" \
  -out "$name.pem" 2> /dev/null
chmod 644 ca.pem "$name.pem"
echo "$folder/$name.pem and $folder/$name.key are for: $*"
