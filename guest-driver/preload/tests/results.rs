// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Results of calls, in programs with unusual demands on the kernel: the same on SMC as on TCP.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on may stop")]

mod common;

use std::path::Path;
use std::process::Stdio;

use common::{Fabric, await_listener, compiled, free_port};

/// Runs the server and the client in a mode each, on TCP or on SMC. Returns their output, and the
/// number of ends on SMC.
fn run(program: &Path, [server, client]: [&str; 2], smc: bool) -> (String, usize) {
    let fabric = Fabric::new(6);
    let port = free_port().to_string();
    let command = |mode: &str| {
        let mut command = fabric.on(smc, "timeout");
        command.args(["-s", "ABRT", "300"]).arg(program).args([mode, &port]);
        command.stdout(Stdio::piped());
        command
    };
    let server = command(server).spawn().unwrap();
    await_listener(port.parse().unwrap());
    let client = command(client).output().unwrap();
    let server = server.wait_with_output().unwrap();
    let outputs = [client, server];
    let text: String =
        outputs.iter().map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).collect();
    let all_succeed = outputs.iter().all(|output| output.status.success());
    assert!(all_succeed, "smc: {smc}, {outputs:?}: {text}");
    (text, fabric.decided().0)
}

/// Two programs print the same on SMC as on TCP. `on_smc`: SMC carries their connection.
fn same_as_tcp(modes: [&str; 2], on_smc: bool) {
    let program = compiled("results", &[]);
    let (expected, _) = run(&program, modes, false);
    assert!(expected.contains("done\n"));
    let (seen, ends) = run(&program, modes, true);
    assert_eq!(seen, expected);
    assert_eq!(ends > 0, on_smc);
}

smc_test_support::tests_of! {
    same_as_tcp:
    fn each_arrival_is_an_edge_of_a_set_in_a_set(["server", "edges"], true);
    fn the_program_chooses_the_signal_of_asynchronous_io(["server", "setsig"], true);
    fn addresses_that_lead_nowhere_are_refused(["server", "addresses"], true);
    fn messages_and_times_that_the_kernel_refuses_are_refused(["server", "messages"], true);
    fn a_splice_that_a_signal_ends_leaves_the_bytes_in_its_pipe(["server", "splices"], true);
    fn a_descriptor_that_another_thread_closes_ends_no_select_with_an_error(["server", "selects"], true);
    fn a_program_that_may_make_no_files_is_not_ended_for_those_of_the_library(["server", "no-files"], false);
    fn a_program_without_memory_goes_on_on_tcp(["server", "no-memory"], false);
    fn a_server_listens_again_when_its_client_has_closed_first(["listens-again", "closes"], true);
    // As anybody else than root, unshare fails on TCP, too.
    fn a_child_in_another_pid_namespace_uses_its_parents_connections(["server", "namespaces"], true);
    fn a_cancelled_thread_ends_in_cancellation_points_only(["server", "cancelled"], true);
    fn a_read_beside_a_disconnect_fails_with_the_kernels_error(["server", "disconnected"], true);
    // A user's chroot fails on TCP, too.
    fn a_program_with_another_root_is_told_that_it_may_make_no_user_namespace(["server", "rooted"], true);
    fn a_filter_of_system_calls_refuses_and_the_connection_goes_on(["server", "filtered"], true);
}
