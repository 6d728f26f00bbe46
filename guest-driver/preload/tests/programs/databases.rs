// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! MariaDB: a thread per connection, and a server that speaks first. ZooKeeper: Java, with watches.

use crate::bed::{Net, Place};
use crate::case::{Carried, seconds, times};
use crate::script::{Script, code};

#[test]
#[ignore = "tests/programs.sh installs the programs and runs it"]
fn mariadb() {
    let net = Net::new();
    let server = |place: &Place| {
        place.script(
            "server",
            r#"
            root=$([ $(id -u) != 0 ] || echo --user=root)
            mariadb-install-db --no-defaults $root --datadir=$D/data \
                --auth-root-authentication-method=normal --skip-test-db >$D/install 2>&1
            exec mariadbd --no-defaults $root --datadir=$D/data --socket=$D/mariadb.sock \
                --bind-address=$A --port=$P --skip-grant-tables --innodb-flush-log-at-trx-commit=0
            "#,
        )
    };
    for (name, what) in [
        ("MariaDB, sysbench point_select", "oltp_point_select"),
        ("MariaDB, sysbench read_write", "oltp_read_write"),
    ] {
        let client = format!(
            r#"
            there="--mysql-host=$A --mysql-port=$P --mysql-user=test --mysql-db=test"
            table="--tables=1 --table-size=2000"
            bench() {{ sysbench {what} $there $table --db-driver=mysql "$@"; }}
            until mariadb --no-defaults -h $A -P $P -u test -e 'create database if not exists test' \
                >$D/create 2>&1
            do
                sleep 0.1
            done
            bench prepare >$D/prepare
            bench --threads=4 --time=$N run >$D/bench
            grep -qE '^ +reconnects: +0 ' $D/bench || fail "$(cat $D/bench)"
            for n in {{1..10}}; do
                got=$(mariadb --no-defaults -N -h $A -P $P -u test -e 'select count(*) from sbtest1' test)
                [ "$got" = 2000 ] || fail "$got rows"
            done
            echo "per second: $(sed -nE 's/^ +queries: .*\((.*) per sec.*/\1/p' $D/bench)"
            "#
        );
        Script {
            name,
            needs: &["mariadbd", "mariadb-install-db", "mariadb", "sysbench"],
            server: &server,
            client: &client,
            count: seconds(),
            carried: Carried::Both,
        }
        .run(&net);
    }
}

#[test]
#[ignore = "tests/programs.sh installs the programs and runs it"]
fn zookeeper() {
    let net = Net::new();
    let server = |place: &Place| {
        place.script(
            "server",
            r#"
            cat >$D/zoo.cfg <<END
dataDir=$D/data
clientPortAddress=$A
clientPort=$P
admin.enableServer=false
END
            exec java -cp /usr/share/java/zookeeper.jar \
                org.apache.zookeeper.server.quorum.QuorumPeerMain $D/zoo.cfg
            "#,
        )
    };
    let client = format!("/usr/bin/python3 {} $A $P $N\nrate $N", code("zookeeper.py"));
    Script {
        name: "ZooKeeper, a watch each",
        needs: &[
            "java",
            "/usr/share/java/zookeeper.jar",
            "/usr/lib/python3/dist-packages/kazoo/__init__.py",
        ],
        server: &server,
        client: &client,
        count: times(50, 1000),
        carried: Carried::Both,
    }
    .run(&net);
}
