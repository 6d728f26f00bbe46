// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Lying clients: a mistake within a message is refused, a malformed message ends the client.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod client;

use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::thread::{JoinHandle, spawn};

use client::*;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, memfd_create};
use vfio_user_virtio::{
    BackEnd, BackEndError, EndError, Event, Identity, MemoryRegion, QueueLayout, SharedMemory,
    serve,
};

const EINVAL: Refused = Refused(22);
const ENOTSUP: Refused = Refused(95);

/// A back end accepting every request.
struct Willing;

type Done = Result<(), BackEndError>;

impl BackEnd for Willing {
    fn link(&self) -> Option<BorrowedFd<'_>> {
        None
    }
    fn features(&mut self) -> Result<u64, BackEndError> {
        Ok(1 << 32)
    }
    fn set_features(&mut self, _: u64) -> Done {
        Ok(())
    }
    fn config(&mut self, len: u16) -> Result<Vec<u8>, BackEndError> {
        Ok(vec![0; len.into()])
    }
    fn set_memory(&mut self, _: &[MemoryRegion<'_>]) -> Done {
        Ok(())
    }
    fn start_queue(
        &mut self,
        _: u16,
        _: &QueueLayout,
        _: BorrowedFd<'_>,
        _: Option<BorrowedFd<'_>>,
    ) -> Done {
        Ok(())
    }
    fn set_call(&mut self, _: u16, _: Option<BorrowedFd<'_>>) -> Done {
        Ok(())
    }
    fn stop_queue(&mut self, _: u16) -> Done {
        Ok(())
    }
    fn reset(&mut self) -> Done {
        Ok(())
    }
}

/// A server, with its events.
struct Server {
    thread: JoinHandle<EndError>,
    refused: Arc<Mutex<Vec<String>>>,
    requests: Arc<Mutex<usize>>,
}

impl Server {
    fn start() -> (Client, Server) {
        let (near, far) = UnixStream::pair().unwrap();
        let refused: Arc<Mutex<Vec<String>>> = Arc::default();
        let requests: Arc<Mutex<usize>> = Arc::default();
        let (said, counted) = (refused.clone(), requests.clone());
        let identity =
            Identity { device_id: 44, class: 0, config_len: 72, queues: 4, queue_size: 256 };
        let thread = spawn(move || {
            let mut report = |event: Event<'_>| match event {
                Event::Request => *counted.lock().unwrap() += 1,
                Event::Refused(error) => said.lock().unwrap().push(error.to_string()),
                Event::BackEndLost(error) => panic!("{error}"),
            };
            let share = |areas| {
                let file = || memfd_create("area", MemfdFlags::CLOEXEC).unwrap();
                let files = (0..areas).map(|_| file()).collect();
                Some(SharedMemory { id: 1, area_len: 4096, files })
            };
            match serve(far, identity, share, &mut || Ok(Willing), &mut report) {
                Err(end) => end,
            }
        });
        (Client::new(near), Server { thread, refused, requests })
    }

    /// The last refusal.
    fn said(&self) -> String {
        self.refused.lock().unwrap().pop().unwrap_or_default()
    }

    /// The reason for the server's end.
    fn end(self) -> String {
        self.thread.join().unwrap().to_string()
    }
}

fn agreed() -> (Client, Server) {
    let (mut client, server) = Server::start();
    client.version();
    (client, server)
}

#[test]
fn a_client_finds_the_function() {
    let (mut client, server) = Server::start();
    let capabilities = client.version();
    assert!(capabilities.contains("\"max_msg_fds\":16"), "{capabilities}");
    let info = client.request(GET_INFO, &words(&[16, 0, 0, 0]), &[]).unwrap();
    assert_eq!(info, words(&[16, 3, 9, 5]));
    for (region, size) in [(0, 0x4000), (1, 0), (2, 0x1000), (6, 0), (7, 256), (8, 0)] {
        let info = client.request(GET_REGION_INFO, &words(&[32, 0, region, 0, 0, 0, 0, 0]), &[]);
        let flags = if size == 0 { 0 } else { 3 };
        assert_eq!(info.unwrap(), words(&[32, flags, region, 0, size, 0, 0, 0]));
    }
    for (kind, count) in [(0, 0), (1, 0), (2, 5)] {
        let info = client.request(GET_IRQ_INFO, &words(&[16, 0, kind, 0]), &[]).unwrap();
        assert_eq!(info, words(&[16, u32::from(count != 0), kind, count]));
    }
    // Probes of correct clients for absent features.
    assert_eq!(client.request(GET_IRQ_INFO, &words(&[16, 0, 3, 0]), &[]), Err(EINVAL));
    assert_eq!(client.request(16, &words(&[8, 0]), &[]), Err(ENOTSUP));
    assert_eq!(server.said(), "");
    drop(client);
    assert_eq!(server.end(), "the client has gone");
}

#[test]
fn a_client_that_maps_files_of_areas_gets_them_with_the_region() {
    let (mut client, server) = Server::start();
    let said = client.version_as("{\"capabilities\":{\"max_msg_fds\":2,\"sparse_mmap_fds\":true}}");
    assert!(said.contains("\"sparse_mmap_fds\":true"), "{said}");
    let size = 2 * 4096;
    // Without room for the areas: how much is needed, and no file.
    let (info, files) = client.region_info(4, 32);
    assert_eq!(info, words(&[32 + 16 + 2 * 32, 7, 4, 0, size, 0, 0, 0]));
    assert!(files.is_empty());
    for argsz in [32 + 16 + 2 * 32, u32::MAX] {
        let (info, files) = client.region_info(4, argsz);
        assert_eq!(info[..32], words(&[112, 15, 4, 32, size, 0, 0, 0]));
        assert_eq!(info[32..48], words(&[0x1_8001, 0, 2, 0]));
        assert_eq!(info[48..80], words(&[0, 0, 0, 0, 4096, 0, 0, 0]));
        assert_eq!(info[80..], words(&[4096, 0, 0, 0, 4096, 0, 1, 0]));
        assert_eq!(files.len(), 2);
    }
    let (info, files) = client.region_info(0, u32::MAX);
    assert_eq!((word(&info, 4), files.len()), (3, 0));
    // A store where the client has mapped the area reaches no memory.
    assert_eq!(client.read(4, 4096, 4), Ok(vec![0; 4]));
    assert_eq!(client.write(4, 4096, &[1; 4]), Ok(()));
    assert_eq!(client.read(4, 4096, 4), Ok(vec![0; 4]));
    assert_eq!(client.read(4, u64::from(size) - 2, 4), Err(EINVAL));
    assert!(server.said().contains("region 4, which has 0x2000"));
    drop(client);
    assert_eq!(server.end(), "the client has gone");
}

#[test]
fn without_a_promise_to_map_files_of_areas_there_are_none() {
    for text in [
        "",
        "{",
        "[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[",
        "\"sparse_mmap_fds\"",
        "{\"capabilities\":[]}",
        "{\"capabilities\":{\"sparse_mmap_fds\":false}}",
        "{\"capabilities\":{\"sparse_mmap_fds\":\"true\"}}",
        "{\"capabilities\":{\"sparse_mmap_fds\":true,\"max_msg_fds\":0}}",
        "{\"capabilities\":{\"sparse_mmap_fds\":true,\"max_msg_fds\":-1.5e300}}",
    ] {
        let (mut client, _server) = Server::start();
        let said = client.version_as(text);
        let areas = usize::from(text.contains("-1.5e300"));
        assert_eq!(said.contains("sparse"), areas == 1, "{text}");
        let (info, files) = client.region_info(4, u32::MAX);
        assert_eq!((word(&info, 16), files.len()), (4096 * areas as u32, areas), "{text}");
    }
    let (mut client, _server) = Server::start();
    client.version_as(
        "{\"capabilities\":{\"sparse_mmap_fds\":true,\"max_msg_fds\":18446744073709551615}}",
    );
    assert_eq!(client.region_info(4, u32::MAX).1.len(), 16);
}

#[test]
fn what_is_no_message_ends_the_client() {
    for ([size, flags], why) in [
        ([15, 0], "a message of 15 bytes"),
        ([0, 0], "a message of 0 bytes"),
        ([u32::MAX, 0], "a message of 4294967295 bytes"),
        ([16 + 16 + 8192 + 1, 0], "a message of 8225 bytes"),
        ([16, 1], "flags 0x1,"),
        ([16, 0x40], "flags 0x40,"),
    ] {
        let (mut client, server) = agreed();
        client.send_raw([GET_INFO, 1], [size, flags], &[], &[]).unwrap();
        assert_eq!(client.stream.read(&mut [0]).unwrap(), 0, "no reply");
        let end = server.end();
        assert!(end.starts_with(why), "{end}");
    }
}

#[test]
fn version_comes_first_and_once() {
    let (mut client, server) = Server::start();
    assert!(client.try_request(GET_INFO, &words(&[16, 0, 0, 0]), &[]).is_err());
    assert_eq!(server.end(), "command 4 where VERSION comes first, and once");

    let (mut client, server) = agreed();
    assert!(client.try_request(VERSION, &[0; 4], &[]).is_err());
    assert_eq!(server.end(), "command 1 where VERSION comes first, and once");

    let (mut client, server) = Server::start();
    assert_eq!(client.request(VERSION, &[1, 0, 0, 0], &[]), Err(EINVAL));
    assert_eq!(server.end(), "version 1.0; version 0.0 is served");

    for body in [&b"\0\0"[..], b"\0\0\0\0{}"] {
        let (mut client, server) = Server::start();
        assert!(client.try_request(VERSION, body, &[]).is_err());
        let end = server.end();
        assert!(end.starts_with(&format!("a VERSION of {} bytes", body.len())), "{end}");
    }
}

#[test]
fn lengths_that_a_command_does_not_have_are_refused() {
    let (mut client, server) = agreed();
    for command in [DMA_MAP, DMA_UNMAP, GET_INFO, GET_REGION_INFO, GET_IRQ_INFO, SET_IRQS] {
        for body in [Vec::new(), vec![0xff; 3], vec![0xff; 8192]] {
            assert_eq!(client.request(command, &body, &[]), Err(EINVAL), "{command}");
            let said = server.said();
            let why = format!("command {command} with {} bytes after", body.len());
            assert!(said.starts_with(&why), "{said}");
        }
    }
    for argsz in [0, 15] {
        assert_eq!(client.request(GET_INFO, &words(&[argsz, 0, 0, 0]), &[]), Err(EINVAL));
        assert!(server.said().contains(&format!("argsz {argsz};")));
    }
    for command in [0, 11, 12, 17, u16::MAX] {
        assert_eq!(client.request(command, &[], &[]), Err(ENOTSUP));
        assert_eq!(server.said(), format!("command {command}, which is not served"));
    }
    assert_eq!(client.request(RESET, &[0], &[]), Err(EINVAL));
    client.request(RESET, &[], &[]).unwrap();
}

#[test]
fn accesses_outside_of_regions_are_refused() {
    let (mut client, server) = agreed();
    for (region, offset, len) in
        [(0, 0x4000, 1), (0, u64::MAX, 4), (0, 0, u32::MAX), (7, 0, 257), (1, 0, 1), (99, 0, 1)]
    {
        assert_eq!(client.read(region, offset, len), Err(EINVAL));
        assert!(server.said().starts_with(&format!("an access to {len} bytes")));
    }
    assert_eq!(client.write(7, 253, &[0; 4]), Err(EINVAL));
    assert_eq!(client.write(0, 0, &[]), Err(EINVAL));
    for count in [0, 3, 5, u32::MAX] {
        let mut body = longs(&[0]);
        body.extend(words(&[0, count, 0]));
        server.said();
        assert_eq!(client.request(REGION_WRITE, &body, &[]), Err(EINVAL));
        assert_eq!(server.said(), format!("a write of {count} bytes with 4 bytes of data"));
    }
    assert_eq!(client.read(7, 0, 256).unwrap()[..4], [0xf4, 0x1a, 0x6c, 0x10]);
    assert_eq!(client.read(2, 0, 4096).unwrap(), vec![0; 4096]);
}

#[test]
fn every_register_can_be_read_and_written_in_any_width() {
    let (mut client, server) = agreed();
    for len in [1u32, 2, 3, 4, 8, 64] {
        for offset in (0..0x100).chain(0x1ff0..0x2060).chain(0x2ff0..0x3020) {
            client.read(0, offset, len).unwrap();
            client.write(0, offset, &vec![0xff; len as usize]).unwrap();
        }
        for offset in 0..256 - u64::from(len) {
            client.read(7, offset, len).unwrap();
            client.write(7, offset, &vec![0xff; len as usize]).unwrap();
        }
    }
    assert_eq!(server.said(), "");
}

#[test]
fn descriptors_where_there_are_none_are_refused_and_too_many_end_the_client() {
    let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    let (mut client, server) = agreed();
    let two = [event.as_fd(), event.as_fd()];
    assert_eq!(client.request(GET_INFO, &words(&[16, 0, 0, 0]), &two[..1]), Err(EINVAL));
    assert_eq!(server.said(), "command 4 with 1 descriptors instead of 0");
    assert_eq!(client.request(DMA_MAP, &[0; 32], &two), Err(EINVAL));
    assert_eq!(server.said(), "command 2 with 2 descriptors instead of 1");
    let many = vec![event.as_fd(); 17];
    let body = words(&[20, 0x24, 2, 0, 17]);
    assert!(client.try_request(SET_IRQS, &body, &many).is_err());
    assert_eq!(server.end(), "more than 16 descriptors with a message");
}

#[test]
fn vectors_and_their_eventfds_are_checked() {
    let events: Vec<_> = (0..5).map(|_| eventfd(0, EventfdFlags::CLOEXEC).unwrap()).collect();
    let (mut client, server) = agreed();
    client.set_irqs(0, &events).unwrap();
    assert_eq!(client.set_irqs(1, &events), Err(EINVAL));
    assert_eq!(server.said(), "5 vectors from 1; there are 5");
    let body = words(&[20, 0x24, 2, 0, 4]);
    assert_eq!(client.request(SET_IRQS, &body, &[events[0].as_fd()]), Err(EINVAL));
    assert_eq!(server.said(), "1 eventfds for 4 vectors");
    client.request(SET_IRQS, &words(&[20, 0x21, 2, 0, 0]), &[]).unwrap();
}

#[test]
fn a_thousand_mappings_are_served_and_the_rest_is_refused() {
    let (mut client, server) = agreed();
    let file = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
    for n in 0..1024 {
        client.map(n << 13, 4096, Some((file.as_fd(), n << 13))).unwrap();
    }
    assert_eq!(client.map(1 << 40, 4096, None), Err(Refused(28)));
    assert_eq!(server.said(), "more than 1024 DMA mappings");
    client.unmap(0, 1 << 30).unwrap();
    client.map(0x1000, 0x2000, None).unwrap();
    assert_eq!(client.map(0x2000, 0x1000, None), Err(Refused(17)));
    assert_eq!(client.unmap(0x1000, 0x1000), Err(Refused(2)));
    // One file, so one descriptor.
    let (pipe, _other) = std::io::pipe().unwrap();
    client.map(1 << 20, 4096, Some((pipe.as_fd(), 0))).unwrap();
}

#[test]
fn requests_without_a_reply_get_none_and_are_refused_all_the_same() {
    let (mut client, server) = agreed();
    client.post(GET_INFO, &[1, 2, 3]);
    client.post(REGION_WRITE, &longs(&[0, 0, 0]));
    client.post(200, &[]);
    client.request(GET_INFO, &words(&[16, 0, 0, 0]), &[]).unwrap();
    assert_eq!(server.refused.lock().unwrap().len(), 3);
    assert_eq!(*server.requests.lock().unwrap(), 4, "each can be made to wait");
}

#[test]
fn a_client_may_go_at_every_byte() {
    let mut body = longs(&[0]);
    body.extend(words(&[7, 2]));
    let whole = 16 + body.len();
    for cut in 0..whole {
        let (client, server) = agreed();
        let mut message = Vec::new();
        message.extend([1, 0]);
        message.extend(REGION_READ.to_ne_bytes());
        message.extend(words(&[whole as u32, 0, 0]));
        message.extend(&body);
        std::io::Write::write_all(&mut &client.stream, &message[..cut]).unwrap();
        drop(client);
        let end = server.thread.join().unwrap();
        assert!(end.is_orderly(), "{cut} bytes: {end}");
    }
    // The client does not read its answers.
    let (mut client, server) = agreed();
    for _ in 0..10 {
        let mut body = longs(&[0]);
        body.extend(words(&[7, 256]));
        client.send_raw([REGION_READ, 1], [32, 0], &body, &[]).unwrap();
    }
    drop(client);
    assert!(server.thread.join().unwrap().is_orderly());
}
