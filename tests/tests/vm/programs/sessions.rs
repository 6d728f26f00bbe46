// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Servers with a process per session.

use std::time::Instant;

use smc_tests::vm::Guest;
use smc_tests::vm::unmodified::after;

use super::cases::Client;

/// Makes the keys of a server and of its client; the server's command line.
pub(super) fn ssh_server([a, b]: [&Guest; 2]) -> String {
    b.ok("ssh-keygen -q -t ed25519 -N '' -f /tmp/user && \
          dd if=/dev/urandom of=/tmp/file bs=64k count=64 2>/dev/null");
    let public = b.ok("cat /tmp/user.pub");
    a.ok(format!(
        "mkdir -p /run/sshd && ssh-keygen -q -t ed25519 -N '' -f /tmp/host && \
         cat > /tmp/user.pub <<'END'\n{public}\nEND\n\
         cat > /tmp/sshd.conf <<'END'\n\
         ListenAddress 10.0.0.1\nHostKey /tmp/host\nPidFile none\nStrictModes no\n\
         AuthorizedKeysFile /tmp/user.pub\nPasswordAuthentication no\nUsePAM no\n\
         PermitRootLogin yes\nSubsystem sftp internal-sftp\nEND"
    ));
    "/bin/sshd -D -e -p PORT -f /tmp/sshd.conf".to_owned()
}

/// Copies a file there and back; MB/s.
pub(super) fn copy(b: &Guest, port: u16, client: &Client<'_>) -> f64 {
    let scp = format!(
        "scp -q -S /bin/ssh -i /tmp/user -o StrictHostKeyChecking=no \
         -o UserKnownHostsFile=/dev/null -o IdentitiesOnly=yes -F none -P {port}"
    );
    let start = Instant::now();
    client(&format!("{scp} /tmp/file root@10.0.0.1:/tmp/there"));
    client(&format!("{scp} root@10.0.0.1:/tmp/there /tmp/back"));
    let took = start.elapsed();
    b.ok("cmp /tmp/file /tmp/back; rm /tmp/back");
    8.388608 / took.as_secs_f64()
}

/// Runs a program as PostgreSQL's user, with every capability of root's processes: a device without an
/// IOMMU is for users entitled to all of memory.
const AS_POSTGRES: &str = "/bin/setpriv --reuid=postgres --regid=postgres --clear-groups --inh-caps=+all \
                           --ambient-caps=+all";

/// Makes a database; the command line of its server.
pub(super) fn database(a: &Guest) -> String {
    a.ok(format!(
        "ln -s /usr/lib/postgresql/*/bin /tmp/pg && cd /tmp && mkdir db && chown postgres db && \
         {AS_POSTGRES} /tmp/pg/initdb -A trust -U postgres --no-sync --no-locale -D /tmp/db && \
         echo 'host all all 0.0.0.0/0 trust' >> /tmp/db/pg_hba.conf"
    ));
    let postgres = a.ok("readlink -f /tmp/pg");
    format!("{AS_POSTGRES} {}/postgres -D /tmp/db -h 10.0.0.1 -p PORT -k /tmp -F", postgres.trim())
}

/// Runs PostgreSQL's own benchmark; transactions per second.
pub(super) fn transactions(b: &Guest, port: u16, options: &str, client: &Client<'_>) -> f64 {
    let there = format!("-h 10.0.0.1 -p {port} -U postgres");
    b.ok(format!(
        "cd /usr/lib/postgresql/*/bin; until ./pg_isready -q {there}; do sleep 0.1; done; \
         ./pgbench -i -q -s 1 {there} postgres 2>&1"
    ));
    let pgbench = b.ok("ls /usr/lib/postgresql/*/bin/pgbench");
    let pgbench = pgbench.trim();
    let text = client(&format!("{pgbench} -n -c 2 -j 1 -T 4 {options} {there} postgres"));
    assert_eq!(after(&text, "number of failed transactions:"), 0.0, "{text}");
    after(&text, "tps =")
}
