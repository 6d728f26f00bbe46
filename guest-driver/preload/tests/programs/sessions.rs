// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Servers with a process per session.

use std::process::Command;

use crate::bed::{self, Net, Place, Program};
use crate::case::{Carried, Case, after, seconds, times};
use crate::common::free_port;
use crate::script::{SERVE, Script};

const SSHD: &str = "/usr/sbin/sshd";

/// A server of SSH, with keys for itself and for the user, and a file of 60 MB.
fn sshd(place: &Place) -> Program {
    let Place { address, port, dir } = place;
    let here = dir.display();
    for key in ["host", "user"] {
        let mut keygen = Command::new("ssh-keygen");
        keygen.args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(dir.join(key));
        assert!(keygen.status().unwrap().success());
    }
    place.data("file", 60_000_000);
    let text = format!(
        "ListenAddress {address}\nPort {port}\nHostKey {here}/host\nPidFile none\nStrictModes no\n\
         AuthorizedKeysFile {here}/user.pub\nPasswordAuthentication no\nUsePAM no\n\
         PermitRootLogin yes\nSubsystem sftp internal-sftp\n"
    );
    std::fs::write(dir.join("sshd.conf"), text).unwrap();
    if bed::is_root() {
        // The directory for processes before authentication.
        let _ = std::fs::create_dir_all("/run/sshd");
    }
    Program::new(format!("{SSHD} -D -e -f {here}/sshd.conf"))
}

/// Options of a client of [`sshd`].
fn ssh_options(place: &Place) -> String {
    format!(
        "-q -i {}/user -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null \
         -o IdentitiesOnly=yes -F none",
        place.dir.display()
    )
}

#[test]
#[ignore = "tests/programs.sh installs the programs and runs it"]
fn ssh_copies_a_file() {
    let net = Net::new();
    let client = |place: &Place| {
        let Place { address, port, dir } = place;
        let here = dir.display();
        let options = format!("{} -P {port}", ssh_options(place));
        let text = format!(
            "set -e\nbegun=$(date +%s%N)\n\
             scp {options} {here}/file $(id -un)@{address}:{here}/there\n\
             scp {options} $(id -un)@{address}:{here}/there {here}/back\n\
             ended=$(date +%s%N)\ncmp {here}/file {here}/back\n\
             echo megabytes: $((120000000000 / (ended - begun + 1)))\n"
        );
        std::fs::write(dir.join("copy.sh"), text).unwrap();
        Program::new(format!("sh {here}/copy.sh"))
    };
    Case {
        name: "ssh, 60 MB there and back",
        needs: &[SSHD, "ssh", "scp", "ssh-keygen"],
        server: &sshd,
        client: &client,
        figure: &|text| after(text, "megabytes:"),
        // sshd executes itself with the connection as its standard input and output.
        seen_by: None,
        carried: Carried::Never,
        wanted: 0.9,
    }
    .run(&net);
}

/// Clients that go to the background after the connect, where other programs use the connection.
#[test]
#[ignore = "tests/programs.sh installs the programs and runs it"]
fn ssh_in_the_background() {
    let net = Net::new();
    // Behind the forwarded port.
    let forwarded = free_port();
    let server = |place: &Place| {
        place.data("large", 10_000_000);
        let sshd = sshd(place).line();
        place.script(
            "server",
            &format!(
                "run socat TCP-LISTEN:{forwarded},bind=127.0.0.1,fork,reuseaddr EXEC:sha256sum\n\
                 run {sshd}\n{SERVE}"
            ),
        )
    };
    let client = format!(
        r#"
        ssh="ssh $(cat $D/options) -p $P"
        there=$(id -un)@$A
        hash=$(sha256sum <$D/large)
        for n in $(seq $N); do
            $ssh -f -N -M -S $D/forward -o ExitOnForwardFailure=yes -L 127.0.0.1:$((P + 1)):127.0.0.1:{forwarded} $there
            for i in 1 2 3; do
                got=$(socat -t 20 - TCP:127.0.0.1:$((P + 1)) <$D/large)
                [ "$got" = "$hash" ] || fail "hash $i is $got"
            done
            $ssh -S $D/forward -O exit $there

            $ssh -o ControlMaster=auto -o ControlPersist=60 -S $D/shared $there true
            $ssh -S $D/shared -O check $there
            for i in 1 2 3; do
                $ssh -o ControlMaster=no -S $D/shared $there cat $D/large | cmp - $D/large
            done
            $ssh -S $D/shared -O exit $there
        done
        rate $N
        "#
    );
    Script {
        name: "ssh in the background",
        needs: &[SSHD, "ssh", "ssh-keygen", "socat"],
        server: &|place| {
            let options = ssh_options(place);
            std::fs::write(place.dir.join("options"), options).unwrap();
            server(place)
        },
        client: &client,
        count: times(1, 5),
        carried: Carried::Any,
    }
    .run(&net);
}

/// Where PostgreSQL's programs are: the newest version, or in the search path.
fn postgres_program(name: &str) -> String {
    let versions = std::fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let found = versions.map(|version| version.path().join("bin").join(name));
    let newest = found.filter(|path| path.is_file()).max();
    newest.map_or_else(|| name.to_owned(), |path| path.display().to_string())
}

#[test]
#[ignore = "tests/programs.sh installs the programs and runs it"]
fn postgresql() {
    let [initdb, postgres, pgbench] = ["initdb", "postgres", "pgbench"].map(postgres_program);
    let is_ready = postgres_program("pg_isready");
    let net = Net::new();
    let server = |place: &Place| {
        let Place { address, port, dir } = place;
        let data = dir.join("data");
        // The server refuses to run as root.
        let mut init = Command::new(&initdb);
        if bed::is_root() {
            init = Command::new("setpriv");
            init.args(["--reuid=postgres", "--regid=postgres", "--init-groups", &initdb]);
        }
        init.args(["-A", "trust", "-U", "postgres", "--no-sync", "-D"]).arg(&data);
        let output = init.current_dir("/").output().unwrap();
        assert!(output.status.success(), "{output:?}");
        let hosts = data.join("pg_hba.conf");
        let text = std::fs::read_to_string(&hosts).unwrap();
        std::fs::write(hosts, text + "host all all 0.0.0.0/0 trust\n").unwrap();
        let (data, here) = (data.display(), dir.display());
        Program::new(format!("{postgres} -D {data} -h {address} -p {port} -k {here} -F"))
            .user("postgres")
    };
    for (name, options, wanted) in [
        ("PostgreSQL, pgbench", "", 0.9),
        ("PostgreSQL, pgbench -S", "-S", 0.9),
        ("PostgreSQL, pgbench -C -S", "-C -S", 0.9),
    ] {
        let client = |place: &Place| {
            let Place { address, port, dir } = place;
            let there = format!("-h {address} -p {port} -U postgres postgres");
            // Each of the first connections takes a process and a device.
            let time = seconds() + 2;
            let text = format!(
                "set -e\nuntil {is_ready} -q -h {address} -p {port}; do sleep 0.05; done\n\
                 {pgbench} -i -q -s 2 {there} 2>&1\n\
                 {pgbench} -n -c 4 -j 1 -T {time} {options} {there}\n"
            );
            std::fs::write(dir.join("bench.sh"), text).unwrap();
            Program::new(format!("sh {}/bench.sh", dir.display()))
        };
        Case {
            name,
            needs: &[&initdb, &postgres, &pgbench],
            server: &server,
            client: &client,
            figure: &|text| {
                assert_eq!(after(text, "number of failed transactions:"), 0.0, "{text}");
                after(text, "tps =")
            },
            // With a connection for each request, looking for one takes longer than the connection
            // lasts.
            seen_by: (!options.contains("-C")).then_some("root"),
            carried: Carried::Both,
            wanted,
        }
        .run(&net);
    }
}
