// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `smc-hyper-echo server ADDRESS`: hyper returns the body of each request.
//! `smc-hyper-echo client ADDRESS TASKS REQUESTS`: reqwest sends as many requests in each task, over
//! kept connections, and compares the answers.

use std::time::Instant;

use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;

type Failure = Box<dyn std::error::Error + Send + Sync>;

async fn serve(address: &str) -> Result<(), Failure> {
    let listener = tokio::net::TcpListener::bind(address).await?;
    loop {
        let (stream, _) = listener.accept().await?;
        tokio::spawn(async move {
            let echo = |request: Request<Incoming>| async {
                Ok::<_, hyper::Error>(Response::new(request.into_body()))
            };
            // A closing client ends the connection.
            let _ = http1::Builder::new()
                .serve_connection(TokioIo::new(stream), service_fn(echo))
                .await;
        });
    }
}

fn body(task: usize, number: usize) -> Vec<u8> {
    let length = (task * 7919 + number * number * 31) % 30_000;
    (0..length).map(|at| (at + task * 17 + number) as u8).collect()
}

async fn ask(address: &str, tasks: usize, requests: usize) -> Result<(), Failure> {
    let client = reqwest::Client::builder().no_proxy().build()?;
    let begun = Instant::now();
    let running: Vec<_> = (0..tasks)
        .map(|task| {
            let (client, url) = (client.clone(), format!("http://{address}/{task}"));
            tokio::spawn(async move {
                for number in 0..requests {
                    let sent = body(task, number);
                    let response = client.post(&url).body(sent.clone()).send().await?;
                    let got = response.error_for_status()?.bytes().await?;
                    if got != sent {
                        return Err(format!("request {number} of task {task} differs").into());
                    }
                }
                Ok::<(), Failure>(())
            })
        })
        .collect();
    for task in running {
        task.await??;
    }
    println!("per second: {}", (tasks * requests) as f64 / begun.elapsed().as_secs_f64());
    Ok(())
}

#[tokio::main(worker_threads = 2)]
async fn main() -> Result<(), Failure> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    match &words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["server", address] => serve(address).await,
        ["client", address, tasks, requests] => ask(address, tasks.parse()?, requests.parse()?).await,
        _ => Err("smc-hyper-echo server ADDRESS | client ADDRESS TASKS REQUESTS".into()),
    }
}
