//! Servers with a process per session.

use std::process::Command;

use crate::bed::{self, Net, Place, Program};
use crate::case::{Case, after, seconds};
use crate::common;

#[test]
#[ignore = "needs programs that are not everywhere: see tests/programs.sh"]
fn ssh_copies_a_file() {
    const SSHD: &str = "/usr/sbin/sshd";
    let net = Net::new();
    let server = |place: &Place| {
        let Place { address, port, dir } = place;
        let here = dir.display();
        for key in ["host", "user"] {
            let mut keygen = Command::new("ssh-keygen");
            keygen.args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(dir.join(key));
            assert!(keygen.status().unwrap().success());
        }
        std::fs::write(dir.join("file"), common::pattern(60_000_000)).unwrap();
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
    };
    let client = |place: &Place| {
        let Place { address, port, dir } = place;
        let here = dir.display();
        let options = format!(
            "-q -i {here}/user -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null \
             -o IdentitiesOnly=yes -F none -P {port}"
        );
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
        server: &server,
        client: &client,
        figure: &|text| after(text, "megabytes:"),
        // sshd executes itself with the connection as its standard input and output.
        seen_by: None,
        can_be_smc: false,
        wanted: 0.9,
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
#[ignore = "needs programs that are not everywhere: see tests/programs.sh"]
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
            can_be_smc: true,
            wanted,
        }
        .run(&net);
    }
}
