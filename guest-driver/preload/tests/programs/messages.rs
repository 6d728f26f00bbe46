// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Message brokers, and a library for messages between processes.

use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use crate::bed::{Bed, Net, Place, Program, Side, are_installed};
use crate::case::{Carried, times};
use crate::common::{Running, free_port};
use crate::languages::echoes_checked;
use crate::script::{SERVE, Script, code};

#[test]
#[ignore = "tests/programs.sh installs the programs and runs it"]
fn mosquitto() {
    let net = Net::new();
    let server = |place: &Place| {
        let Place { address, port, dir } = place;
        let file = dir.join("mosquitto.conf");
        let text = format!(
            "listener {port} {address}\nallow_anonymous true\nmax_queued_messages 0\nuser root\n\
             max_inflight_messages 0\nlog_type error\n"
        );
        std::fs::write(&file, text).unwrap();
        Program::new(format!("mosquitto -c {}", file.display()))
    };
    Script {
        name: "mosquitto",
        needs: &["mosquitto", "mosquitto_pub", "mosquitto_sub"],
        server: &server,
        client: r#"
        there="-h $A -p $P -t test -q 1"
        # The broker keeps the messages of a session that has subscribed.
        mosquitto_sub $there -c -i reader -E
        for n in $(seq $N); do echo "message $n"; done >$D/sent
        mosquitto_pub $there -l <$D/sent
        mosquitto_sub $there -c -i reader -C $N -W 60 >$D/got
        cmp $D/sent $D/got
        rate $N
        "#,
        count: times(2000, 20_000),
        carried: Carried::Both,
    }
    .run(&net);
}

#[test]
#[ignore = "tests/programs.sh installs the programs and runs it"]
fn rabbitmq() {
    const SERVER: &str = "/usr/lib/rabbitmq/bin/rabbitmq-server";
    let net = Net::new();
    let server = |place: &Place| {
        // The server's nodes find each other by a daemon of their own, ended here along with the
        // server.
        let settings = r#"
            printf '%s\n' "listeners.tcp.1 = $A:$P" 'loopback_users = none' >$D/rabbitmq.conf
            echo '[].' >$D/enabled
            export ERL_EPMD_PORT=$((P + 1)) ERL_EPMD_ADDRESS=127.0.0.1
            export RABBITMQ_CONFIG_FILE=$D/rabbitmq.conf RABBITMQ_MNESIA_BASE=$D/rabbit
            export RABBITMQ_LOG_BASE=$D/rabbit.log RABBITMQ_ENABLED_PLUGINS_FILE=$D/enabled
            export RABBITMQ_NODENAME=test@localhost RABBITMQ_DIST_PORT=$((P + 2))
            export RABBITMQ_PID_FILE=$D/rabbit.pid RABBITMQ_CONF_ENV_FILE=/dev/null
            epmd=$(echo /usr/lib/erlang/erts-*/bin/epmd)
            run $epmd
            "#;
        place.script("server", &format!("{settings}run {SERVER} >$D/rabbit.out 2>&1\n{SERVE}"))
    };
    Script {
        name: "RabbitMQ",
        needs: &[SERVER, "amqp-publish", "amqp-consume", "amqp-declare-queue"],
        server: &server,
        client: r#"
        there="--url=amqp://guest:guest@$A:$P"
        amqp-declare-queue $there -q test >$D/queue
        for n in $(seq $N); do echo "message $n"; done >$D/sent
        amqp-publish $there -r test -l <$D/sent
        amqp-consume $there -q test -c $N -- cat >$D/got
        cmp $D/sent $D/got
        rate $N
        "#,
        count: times(100, 1000),
        // Its processes and their name server connect to each other.
        carried: Carried::Server,
    }
    .run(&net);
}

/// The C library of gRPC sets SO_ZEROCOPY and TCP_USER_TIMEOUT of its listeners.
#[test]
#[ignore = "tests/programs.sh installs the programs and runs it"]
fn grpc() {
    if are_installed("gRPC", &["/usr/lib/python3/dist-packages/grpc/__init__.py"]) {
        let program = format!("/usr/bin/python3 -B {}", code("checked_grpc.py"));
        echoes_checked("gRPC", &program, &program, times(1000, 20_000), &Net::new());
    }
}

/// Two processes started by mpirun, one at each end.
#[test]
#[ignore = "tests/programs.sh installs the programs and runs it"]
fn open_mpi() {
    const NAME: &str = "Open MPI";
    let needs = ["mpirun", "orted", "/usr/lib/python3/dist-packages/mpi4py/__init__.py"];
    if !are_installed(NAME, &needs) {
        return;
    }
    let net = Net::new();
    for (server, client) in [(true, true), (true, false), (false, true), (false, false)] {
        let bed = Bed::new(&net);
        let place = bed.place(free_port());
        let dir = place.dir.display();
        let run = bed.smc_run();
        let by = |smc: bool| if smc { run.as_str() } else { "" };
        place.script(
            "rank",
            &format!(
                "program='/usr/bin/python3 {}'\n\
                 if [ $OMPI_COMM_WORLD_RANK = 0 ]; then exec {} $program $1; fi\n\
                 exec {} $program $1\n",
                code("ring.py"),
                by(server),
                by(client),
            ),
        );
        let (hosts, agent) = match net.namespace(Side::Client) {
            Some(name) => ("10.77.0.1,10.77.0.2", format!("nsenter --net=/run/netns/{name}")),
            None => ("127.0.0.1:2", String::new()),
        };
        // mpirun starts its daemon at the other end by this instead of by ssh.
        let agent = format!("#!/bin/sh\nshift\nexec {agent} sh -c \"$*\"\n");
        let file = place.dir.join("agent.sh");
        std::fs::write(&file, agent).unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).unwrap();
        let mpirun = Program::new(format!(
            "mpirun --allow-run-as-root --mca plm_rsh_agent {dir}/agent.sh --host {hosts} -np 2 \
             --map-by node --mca btl tcp,self --mca pml ob1 bash {dir}/rank.sh {}",
            times(200, 2000),
        ));
        let mut command = bed.command(Side::Server, &mpirun, false, false);
        let text = Running::start(&mut command).within(Duration::from_secs(120)).finish();
        assert!(text.contains("all messages are right"), "{text}");
        assert_eq!(bed.broken(), Vec::<String>::new());
        let (smc, tcp) = bed.decided();
        let both = server && client;
        assert_eq!(smc > 0, both, "{server} {client}: {smc} ends on SMC, {tcp} on TCP");
    }
    println!("{NAME:28} works in all combinations");
}
